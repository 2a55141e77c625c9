"""Further strategies and compressors, one a file: a lesson to read and run, and a plugin that is
found by its name (`--strategy easgd`, `--compress topk`). README.md has the list."""
