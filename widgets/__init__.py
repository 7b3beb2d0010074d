"""Widgets: boards that show a running job in a notebook."""
