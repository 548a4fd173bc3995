"""The report: what it shows of a run, and that no completion can break out of it."""

import json
import re

import pytest

from posttrain.errors import RunFolderError
from posttrain.grpo.rollouts import write_rollouts
from posttrain.report import watch_report, write_report
from posttrain.run_folder import RunFolder

EVIL = "</script><script>alert(1)</script>"


ROLLOUT = {
    "step": 1,
    "prompt": "1+1=?",
    "completion": EVIL,
    "answer": "2",
    "reward": 1.0,
    "rewards": {"accuracy": 1.0},
    "correct": True,
    "advantage": 0.5,
    "length": 4,
    "finish_reason": "stop",
}
EVAL_SAMPLE = {
    "problem_id": "p1",
    "problem": "2+2=?",
    "text": "5",
    "gold": "4",
    "correct": False,
    "length": 1,
    "finish_reason": "stop",
}


def fill(path):
    run = RunFolder(path)
    for step in range(30):
        run.append_metrics("sft", step, {"loss": 3.0 / (step + 1)})
        run.append_metrics("grpo", step, {"reward": step / 30, "kl": float("nan")})
    write_rollouts(path / "rollouts", 1, [ROLLOUT])
    folder = path / "eval" / "base" / "toy"
    folder.mkdir(parents=True)
    (folder / "samples.jsonl").write_text(json.dumps(EVAL_SAMPLE) + "\n")


def embedded(page: str) -> dict:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    return json.loads(match[1])


def test_report_holds_curves_and_samples(tmp_path):
    fill(tmp_path)
    page = write_report(tmp_path).read_text()
    data = embedded(page)
    curves = {(c["stage"], c["metric"]): c["points"] for c in data["curves"]}
    assert curves["grpo", "reward"][29] == [29, pytest.approx(29 / 30)]
    assert ("grpo", "kl") not in curves, "a curve of nothing but NaN is left out"
    assert data["rollouts"][0]["rewards"] == {"accuracy": 1.0}
    assert data["eval_samples"][0]["model"] == "base"


def test_every_curve_is_a_metric_that_its_stage_writes():
    from posttrain.grpo.callbacks import METRIC_NAMES as GRPO
    from posttrain.report.collect import CURVES, PICTURES
    from posttrain.sft.trainer import METRIC_NAMES as SFT

    # The rest of GRPO's keep the names under which TRL and the scorer log them.
    same = {"reward", "accuracy", "pass_rate", "entropy", "kl", "loss", "grad_norm", "tokens_per_second"}
    known = {"sft": set(SFT.values()), "grpo": set(GRPO.values()) | same}
    assert [(stage, metric) for stage, metric, _ in CURVES if metric not in known[stage]] == []
    assert [name for stage, _, _, names in PICTURES for name in names if name not in known[stage]] == []


def test_completions_cannot_script_the_page(tmp_path):
    fill(tmp_path)
    page = write_report(tmp_path).read_text()
    assert EVIL not in page
    assert embedded(page)["rollouts"][0]["completion"] == EVIL


def test_page_needs_no_network(tmp_path):
    page = write_report(tmp_path).read_text()
    addresses = set(re.findall(r"https?://[^\"'\s)]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}, "the only address is SVG's namespace, which nothing fetches"


def test_report_of_an_empty_folder(tmp_path):
    assert embedded(write_report(tmp_path).read_text())["curves"] == []


@pytest.mark.parametrize(
    "name", ["stages.json", "eval/results.json", "eval/base/toy/samples.jsonl", "rollouts/step-000001.parquet"]
)
def test_a_damaged_file_is_named(tmp_path, name):
    fill(tmp_path)
    (tmp_path / name).write_text("{broken\n")
    with pytest.raises(RunFolderError, match=name.rpartition("/")[2]):
        write_report(tmp_path)


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    fill(tmp_path)
    with (tmp_path / "eval/base/toy/samples.jsonl").open("a") as file:
        file.write('{"problem_id": "p2", "pro')
    assert [sample["id"] for sample in embedded(write_report(tmp_path).read_text())["eval_samples"]] == ["p1"]


def test_lines_that_belong_together_share_a_picture(tmp_path):
    run = RunFolder(tmp_path)
    for step in range(3):
        shares = {f"staleness/age_{age}": age / 10 for age in (0, 2, 10)}
        run.append_metrics("grpo", step, {**shares, "time_wait": 1.0, "time_update": 2.0 + step, "tokens_per_second": 5.0})
    pictures = {curve["title"]: curve["series"] for curve in embedded(write_report(tmp_path).read_text())["curves"]}
    ages = pictures["Age of tokens in versions (share)"]
    assert [line["name"] for line in ages] == ["0", "2", "10"], "by age, not by letter"
    assert ages[2]["points"] == [[0, 1.0], [1, 1.0], [2, 1.0]]
    assert [line["name"] for line in pictures["Seconds of a step"]] == ["wait", "update"]
    assert [line["name"] for line in pictures["Tokens a second"]] == ["tokens_per_second"]


def test_watching_follows_a_run_to_its_end(tmp_path, capsys):
    from tests.sft_runs import recipe

    made = recipe(tmp_path / "run")
    with pytest.raises(RunFolderError, match="no run folder"):
        watch_report(made, 5.0)
    run = RunFolder(tmp_path / "run")
    run.path.mkdir(exist_ok=True)
    (run.path / "config.yaml").write_text("name: x")
    seen = []

    def sleep(seconds):
        """The run writes on, and is finished after the second look."""
        page = embedded((run.path / "report.html").read_text())
        seen.append((seconds, page["refresh_s"], len(page["curves"])))
        for step in range(2):
            run.append_metrics("grpo", 2 * len(seen) + step, {"reward": 1.0})
        if len(seen) == 2:
            for stage in made.stages:
                run.mark_done(stage)

    path = watch_report(made, 5.0, sleep=sleep)
    assert seen == [(5.0, 5.0, 0), (5.0, 5.0, 1)]
    assert embedded(path.read_text())["refresh_s"] is None, "the last page looks for no other"
    assert "written anew every 5 s" in capsys.readouterr().out
