"""metrics.jsonl, the progress bar and wandb."""

from __future__ import annotations

import json
import os
import socket

import pytest
import wandb

from train.log import Log, LogConfig, cut


def test_each_call_is_one_line_that_is_on_disk_at_once(tmp_path):
    log = Log(LogConfig(), tmp_path, {}, 4, 0, True)
    log(1, {"loss/ce": 2.5})
    log(2, {"loss/ce": 1.5, "lr": 1e-3})
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert found == [{"step": 1, "loss/ce": 2.5}, {"step": 2, "loss/ce": 1.5, "lr": 1e-3}]
    log.close()


def test_a_second_log_goes_on_below_the_first(tmp_path):
    for step in (1, 2):
        log = Log(LogConfig(), tmp_path, {}, 2, step - 1, True)
        log(step, {"x": 0.0})
        log.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_other_ranks_write_nothing(tmp_path, capfd):
    log = Log(LogConfig(wandb=True), tmp_path, {}, 4, 0, False)
    log(1, {"x": 1.0})
    log.progress({"ce": "1.0"})
    log.say("something")
    log.close()
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_the_lines_of_a_resumed_step_and_before_are_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "x": step}) + "\n" for step in (2, 3, 3, 4, 6)))
    cut(path, 3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [2, 3, 3]
    cut(path, 0)
    assert path.read_text() == ""


@pytest.mark.parametrize("torn", ['{"step": 3, "x"', '{"step": 3', "{", '{"step": 3, "x": 1.'])
def test_a_line_torn_by_a_kill_is_dropped(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 2, "x": 1.0}\n' + torn)
    cut(path, 3)
    assert path.read_text() == '{"step": 2, "x": 1.0}\n'
    assert [found.name for found in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_run_without_metrics_has_nothing_to_cut(tmp_path):
    cut(tmp_path / "metrics.jsonl", 3)
    assert list(tmp_path.iterdir()) == []


def test_log_lines_are_at_least_a_step_apart():
    with pytest.raises(ValueError, match=r"log\.every=0"):
        LogConfig(every=0)


def test_wandb_without_a_key_writes_an_offline_run_and_opens_no_connection(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # where a key would be
    reached = []
    connect = socket.socket.connect

    def watched(self, address):
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
            reached.append(address)
            raise OSError("no network here")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", watched)
    log = Log(LogConfig(wandb=True, project="tests"), tmp_path, {"optim": {"lr": 1.0}}, 2, 0, True)
    log(1, {"loss/ce": 2.0})
    log(2, {"loss/ce": 1.0})
    log.close()
    assert wandb.run is None  # finished by us, not by the end of the process
    wandb.teardown()  # its writer is a process of its own, some milliseconds behind; this waits for it
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"loss/ce" in written.read_bytes()
    assert reached == []
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
