"""What each precision does to a model, beside float32: `batchgen eval-quant`, kept as lines.

python -m benchmarks.engine.bench_precision --data gsm8k.jsonl:question,answer --data book.txt
"""

from typing import Any

from batchgen.api.eval_quant import eval_quant
from benchmarks import record
from benchmarks.engine.bench_offline import MODEL


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument(
        "--data", action="append", required=True, metavar="FILE[:COLUMN]", help="may be repeated"
    )
    parser.add_argument("--scheme", nargs="+", default=["int8", "fp8", "int4"])
    parser.add_argument("--kv-cache-dtype", nargs="+", default=["float32", "int8"])
    parser.add_argument("--tokens", type=int, default=8192, help="most tokens of each text")
    parser.add_argument("--length", type=int, default=512)
    args = parser.parse_args()
    for data in args.data:
        report = eval_quant(
            args.model, ["none", *args.scheme], data, kv_cache_dtypes=args.kv_cache_dtype, tokens=args.tokens,
            length=args.length, on_phase=lambda line: print(line, flush=True),
        )  # fmt: skip
        print(report, flush=True)
        if args.no_save:
            continue
        for each in report.to_mapping()["schemes"]:
            case: dict[str, Any] = {
                "model": args.model, "text": data.rpartition("/")[2], "tokens": report.num_tokens,
                "length": args.length, "scheme": each.pop("scheme"),
                "kv_cache_dtype": each.pop("kv_cache_dtype"),
            }  # fmt: skip
            record.append("precision", case, each)


if __name__ == "__main__":
    main()
