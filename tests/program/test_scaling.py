"""shoal bench scaling: what is in its rows, on 1, 2 and 3 ranks of one job."""

from __future__ import annotations

import json
from pathlib import Path

import jobs

OPTIONS = ("--repeats", 2, "--rounds", 2, "--cores", 2, "--set", "train.batch=12")


def test_rows_of_one_job_that_is_resized(tmp_path: Path) -> None:
    out, config = tmp_path / "out", jobs.EXPERIMENTS / "digits.toml"
    command = [*jobs.SHOAL, "bench", "scaling", "-n", 3, config, "--ranks", "1,2,3", "--out", out, *OPTIONS]
    jobs.done(jobs.Job(tmp_path, command))
    assert (out / "DONE").exists()
    header, *rows = map(json.loads, (out / "scaling.jsonl").read_text().splitlines())
    assert header["bench"] == "scaling" and header["model"]["net"] == "convnet-s" and header["world"] == 3
    assert [(row["mode"], row["ranks"]) for row in rows] == [(m, n) for m in ("weak", "strong") for n in (1, 2, 3)]
    for row in rows:
        assert row["repeats"] == 2 and row["nodes"] == [row["ranks"]]
        assert row["low_ms"] <= row["round_ms"] <= row["high_ms"]
        assert row["oversubscribed"] == (row["ranks"] == 3) == ("efficiency" not in row)
        assert row["batch"] == (12 if row["mode"] == "weak" else 12 // row["ranks"])
    assert rows[0]["efficiency"] == rows[3]["efficiency"] == 1


def test_ranks_that_the_job_has_not_are_refused(tmp_path: Path) -> None:
    config = jobs.EXPERIMENTS / "digits.toml"
    for words, sentence in (
        (["--ranks", "1,4"], "this job has 2; start more, or give fewer"),
        (["--set", "train.batch=7"], "a batch of 7 cannot be shared by 2 ranks"),
    ):
        with jobs.Job(tmp_path, [*jobs.SHOAL, "bench", "scaling", "-n", 2, config, *words]) as job:
            ended = job.end(jobs.DEADLINE_S)
        assert ended.status == 2 and ended.output.count(sentence) == 1 and "Traceback" not in ended.output
