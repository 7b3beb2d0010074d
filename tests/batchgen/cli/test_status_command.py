import json


def test_status_of_a_finished_job(invoke, make_job) -> None:
    assert invoke("run", make_job(model="echo:?fail=row 2", rows=4)).code == 3
    done = invoke("status", "out")
    assert done.code == 0
    assert "4 of 4 rows" in done.out
    assert "finished" in done.out
    found = json.loads(invoke("status", "out", "--json").out)
    assert (found["state"], found["rows_done"], found["rows_failed"]) == ("finished", 4, 1)


def test_a_folder_that_is_no_output(invoke, tmp_path) -> None:
    done = invoke("status", tmp_path)
    assert done.code == 2
    assert str(tmp_path) in done.err
    assert "Traceback" not in done.err
