"""The progress board and the bar."""

import io

from posttrain.runtime.progress import Bar, Outcome, ProgressBoard, Report, clock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_board_keeps_the_newest_report_and_answers_with_the_wish_to_stop():
    board = ProgressBoard()
    assert board.read("sft") == Report()
    assert board.report("sft", 3, 10, {"loss": 0.5}, "saving") is False
    assert board.read("sft") == Report(step=3, total=10, metrics={"loss": 0.5}, note="saving")
    board.request_stop()
    assert board.report("sft", 4, 10, {}) is True
    assert board.stop_requested()


def test_the_first_failure_stays():
    board = ProgressBoard()
    board.finish("sft", Outcome(kind="failed", message="the cause"))
    board.finish("sft", Outcome(kind="failed", message="rank 1 lost rank 0"))
    board.finish("sft", Outcome(kind="done"))
    assert board.outcome("sft") == Outcome(kind="failed", message="the cause")
    assert board.outcome("grpo") is None
    board.begin("sft")  # Ray Train starts all ranks again
    board.finish("sft", Outcome(kind="done"))
    assert board.outcome("sft") == Outcome(kind="done")


def test_terminal_bar_overwrites_its_line_and_estimates_the_rest_without_the_start_up():
    stream, now = Terminal(), Clock()
    bar = Bar("sft", stream, now=now)
    bar.update(Report(note="loading"))
    assert "loading [0:00]" in stream.getvalue()
    now.seconds = 30  # imports
    bar.update(Report(step=10, total=110))
    now.seconds = 40
    bar.update(Report(step=60, total=110, metrics={"loss": 1.23456}))
    line = stream.getvalue().rsplit("\r", 1)[1]
    assert "60/110 [0:40<0:10] loss 1.235" in line
    assert "55% |#############-----------|" in line
    assert "\n" not in stream.getvalue()
    bar.close(Report(step=110, total=110), "done")
    assert stream.getvalue().endswith("110/110 [0:40]  done\x1b[K\n")


def test_plain_lines_are_seldom():
    stream, now = io.StringIO(), Clock()
    bar = Bar("grpo", stream, now=now)
    for tenth in range(200):
        now.seconds = tenth / 10
        bar.update(Report(step=tenth, total=200))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4
    assert "\r" not in stream.getvalue()


def test_clock():
    assert [clock(0), clock(61), clock(3725)] == ["0:00", "1:01", "1:02:05"]
