"""Around the loop: the run directory, data and target in, drafter directory and report out."""

from __future__ import annotations

import fcntl
import hashlib
import json
import random
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import yaml
from safetensors.torch import load_file

from data.capture import check_ids, source
from data.examples import examples as to_examples
from data.examples import renderer
from data.pack import pack
from data.sources import BUNDLED, Row, check_skips, content_id, read, split_point
from data.stream import Stream
from drafters import checkpoint as directory_format
from drafters import vocab as vocabulary
from drafters.method import Drafter, build
from drafters.target import EMBEDDED, Target, load, pick_dtype
from drafters.types import Batch, Example
from eval import replay, report
from eval.evaluate import evaluate, held_out, numbers_of_drafts
from train import checkpoint
from train.engine import check_launch, local_device, make_engine, rank, world_size
from train.log import Log, cut
from train.loop import Job, best, evaluating, train

if TYPE_CHECKING:
    from recipes.schema import Run

PACKAGES = ("torch", "transformers", "deepspeed", "safetensors", "numpy")
LEFT_BY_A_RUN = (
    "recipe.yaml*", "metrics.*", "checkpoints", "best*.safetensors", "best*.tmp", "drafter", "drafter.tmp",
    "report*", "answers-*", "wandb", ".lock",
)  # fmt: skip


@dataclass
class Loaded:
    """Target and conversations of a run; those held out are rank 0's, which measures acceptance."""

    target: Target
    train: list[Example]
    held: list[Example]
    data_key: str

    @property
    def belongs(self) -> dict[str, Any]:
        """What has to be the same again when a checkpoint is resumed."""
        return {
            "data": self.data_key,
            "target weights": self.target.fingerprint["weights"],
            "number of ranks": world_size(),
        }


def run_training(run: Run, recipe: str | None) -> Path:
    """Train, export, report; or go on where an interrupted run of the same settings stopped.

    Errors: ``ValueError`` for a run directory of other settings, for data that cannot be used, and for an
    export that does not reproduce the training logits. Nothing half-written is left.
    """
    if run.method.name == "none":
        raise ValueError("no method: add a recipe, for example `python -m train +recipe=dflash`")
    check_launch(run.train.engine, run.train.packs)
    device = local_device(run.hardware.device)  # first: what is loaded below goes to this rank's GPU
    times = Times()
    with open_directory(run, recipe, device) as directory:
        with times.of("target and rows"):
            loaded = load_data(run, directory, device)
        if rank() == 0:
            checkpoint.check(directory / "checkpoints", loaded.belongs)
            write_record(run, directory, loaded)
        with times.of("states"):
            job, progress = prepare(run, directory, loaded)
        with times.of("training"), closing(job.log):
            train(job, progress, run.train, run.optim, run.log.every)
        if rank() == 0:  # the other ranks end here
            with times.of("export and report"):
                export(run, job, loaded, progress)
                if run.train.report:
                    write_report(run, job, loaded)
            print(times)
    return directory


class Times:
    """Seconds of each part of a run, for its last line."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        begun = perf_counter()
        yield
        self.seconds[part] = perf_counter() - begun

    def __str__(self) -> str:
        return "seconds: " + ", ".join(f"{part} {taken:.0f}" for part, taken in self.seconds.items())


# The run directory ------------------------------------------------------------------------------


@contextmanager
def open_directory(run: Run, recipe: str | None, device: torch.device) -> Iterator[Path]:
    """``runs/<name>``, for this process alone; refused when it holds a run of other settings.

    A directory made here is gone again when a user's mistake keeps the run from its first step.
    """
    name = run.run or f"{recipe or run.method.name}-{Path(run.target).resolve().name}"
    if name == ".." or Path(name).name != name:
        raise ValueError(f"run={name}: a name under runs/, not a path; write for example run=mine")
    directory = Path("runs") / name
    record = directory / "recipe.yaml"
    settle_dtype(run, record, device)
    if rank() != 0:
        yield directory
        return
    made = not directory.exists()
    if not made and not record.exists() and any(path.name != ".lock" for path in directory.iterdir()):
        raise ValueError(
            f"{directory} exists and is no run (it has no recipe.yaml); choose another with run=NAME"
        )
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory):
        try:
            if record.exists() and run.overwrite:
                _clear(directory)
            if record.exists():
                _refuse_other(run, yaml.safe_load(record.read_text())["settings"], directory)
            else:
                write_record(run, directory)
            yield directory
        except ValueError:
            if made and not (directory / "metrics.jsonl").exists():
                shutil.rmtree(directory)
            raise


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Two processes never write to one run; the system drops the lock of one that was killed."""
    with open(directory / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{directory}: another process trains this run; wait for it, or choose another with run=NAME"
            ) from error
        yield


def _clear(directory: Path) -> None:
    """Delete what a run left, for ``overwrite=true``, and nothing where there is more than that."""
    for path in directory.iterdir():
        if not any(fnmatch(path.name, pattern) for pattern in LEFT_BY_A_RUN):
            raise ValueError(
                f"overwrite=true: {path} is nothing that a run leaves; move it away, or choose another "
                "directory with run=NAME"
            )
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != ".lock":
            path.unlink()


def settle_dtype(run: Run, record: Path, device: torch.device) -> None:
    """``auto`` is measured, so it is decided once: a resumed run and all ranks compute as the first did."""
    if run.hardware.dtype != "auto":
        return
    if device.type == "cpu" and world_size() > 1:
        run.hardware.dtype = "float32"
    elif record.exists() and not run.overwrite:
        run.hardware.dtype = yaml.safe_load(record.read_text())["settings"]["hardware"]["dtype"]
    else:
        run.hardware.dtype = str(pick_dtype("auto", device)).removeprefix("torch.")


def settings_of(run: Run) -> dict[str, Any]:
    """What must not differ between a run and its resumption: all but names of outputs and logging."""
    free = (
        "task",
        "run",
        "overwrite",
        "out",
        "prompt",
        "prompt_file",
        "drafter",
        "log",
        "serve",
        "regenerate",
    )
    return {key: value for key, value in json.loads(json.dumps(asdict(run))).items() if key not in free}


def _refuse_other(run: Run, stored: dict[str, Any], directory: Path) -> None:
    mine, theirs = _flat(settings_of(run)), _flat(stored)
    other = [key for key in sorted(mine.keys() | theirs.keys()) if mine.get(key) != theirs.get(key)]
    if other:
        shown = "\n".join(f"  {key}: {theirs.get(key)!r} there, {mine.get(key)!r} now" for key in other[:12])
        raise ValueError(
            f"{directory} holds a run with other settings:\n{shown}\n"
            "Give this run another name with run=NAME, or overwrite=true to start it again."
        )


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            out.update(_flat(value, f"{prefix}{key}."))
        else:
            out[prefix + key] = value
    return out


def write_record(run: Run, directory: Path, loaded: Loaded | None = None) -> None:
    """recipe.yaml: resolved settings, versions, commit; target and data hash as soon as they are known."""
    record = {
        "settings": settings_of(run),
        "versions": versions(),
        "commit": commit(),
        "ranks": world_size(),
    }
    if loaded is not None:
        record["target"] = loaded.target.fingerprint
        record["data"] = {
            "key": loaded.data_key,
            "train_rows": len(loaded.train),
            "held_out_rows": len(loaded.held),
        }
    report.replace_file(directory / "recipe.yaml", yaml.safe_dump(record, sort_keys=False).encode())


def versions() -> dict[str, str]:
    """Installed versions of what a result depends on."""
    out = {"foredraft": directory_format.own_version()}
    for name in PACKAGES:
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            out[name] = "absent"
    return {**out, "hip": str(torch.version.hip), "cuda": str(torch.version.cuda)}


def commit() -> str:
    """The commit of the source, ``unknown`` outside a repository."""
    where = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=where, capture_output=True, text=True, check=False
        )
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


# Data -------------------------------------------------------------------------------------------


def load_data(run: Run, directory: Path, device: torch.device) -> Loaded:
    """The target, and conversations to train on and to hold out."""
    target = load(run.target, replace(run.hardware, device=str(device)))
    render = renderer(run.data, target.tokenizer, target.stop_ids, target.signature)
    found, seen = to_examples(read(run.data), render, run.data.max_length, run.data.strict)
    check_skips(seen, run.data.max_skip)
    check_ids(found, target.vocab_size)
    held = _held_out(run, target, render, directory)
    if held is None:
        apart = hold_out([row for row in seen if row.skip is None], run.data.holdout, run.data.seed)
        held = [turn for example in found if _row(example) in apart for turn in turns(example)]
        found = [example for example in found if _row(example) not in apart]
    if rank() != 0:
        held = []
    elif not held:
        raise ValueError(
            f"data.holdout={run.data.holdout}: no conversation is left to measure acceptance on; give a "
            "larger share, or data.eval_path=FILE"
        )
    rows = json.dumps([[e.ids, e.mask] for e in (*found, *held)])
    return Loaded(target, found, held, hashlib.sha256(rows.encode()).hexdigest()[:16])


def _held_out(run: Run, target: Target, render, directory: Path) -> list[Example] | None:
    """Held-out answers from their own source, ``None`` when a part of the training rows has to serve."""
    path = run.data.eval_path or (BUNDLED if run.data.path == BUNDLED else None)
    if path is None:
        return None
    if rank() != 0:
        return []  # rank 0 alone measures acceptance
    return held_out(
        replace(run.data, path=path, split="eval", limit=None), target, render, run.eval, directory
    )


def hold_out(rows: Sequence[Row], share: float, seed: int) -> set[str]:
    """Where the rows to hold out stand: a share of each domain's conversations, drawn by ``seed``.

    Rows that ask the same stay on one side. A domain of one conversation is trained on.
    """
    by_domain: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        asked = content_id(row.asked, row.tools)
        by_domain.setdefault(row.domain, {}).setdefault(asked, []).append(row.where)
    held: set[str] = set()
    for conversations in by_domain.values():
        some = list(conversations.values())
        random.Random(seed).shuffle(some)
        border = split_point(len(some), 1 - share) if len(some) > 1 else 1
        held.update(where for group in some[border:] for where in group)
    return held


def _row(example: Example) -> str:
    """Where the row of an example stands; those of one conversation are told apart by a turn."""
    return example.name.split(" (turn ")[0]


def turns(example: Example) -> list[Example]:
    """One example an answer, each with all that came before it: replay walks one answer at a time."""
    out: list[Example] = []
    end = 0
    for supervised, group in groupby(example.mask):
        start, end = end, end + len(list(group))
        if supervised:
            name, mask = f"{example.name} (turn {len(out) + 1})", [False] * start + [True] * (end - start)
            out.append(Example(example.ids[:end], mask, example.domain, name))
    return out


def prepare(run: Run, directory: Path, loaded: Loaded) -> tuple[Job, checkpoint.Progress]:
    """States, draft vocabulary, drafter, engine; restored from the newest checkpoint where there is one."""
    target, settings = loaded.target, run.method
    vocab = None
    if settings.draft_vocab is not None and settings.draft_vocab < target.vocab_size:
        counts_V = vocabulary.count_tokens(
            (torch.tensor(e.ids)[torch.tensor(e.mask)] for e in loaded.train), target.vocab_size
        )
        usable = None if target.tokenizer is None else len(target.tokenizer)
        vocab = vocabulary.choose(counts_V, settings.draft_vocab, target.stop_ids, usable)
        print(f"draft vocabulary: {len(vocab)} tokens, {vocab.covers(counts_V):.2%} of the supervised ones")
    torch.manual_seed(run.seed)  # here, so that nothing before this changes what a drafter starts from
    drafter = build(settings, target, vocab).to(target.device)
    numbers_of_drafts(run.eval, drafter)
    _refuse_mask_token(drafter, loaded.train)
    dtype = pick_dtype(run.hardware.dtype, target.device)
    engine = make_engine(
        run.train.engine, run.optim, target.device, dtype, run.train.packs, run.train.zero_stage
    )
    states, usable_rows = source(
        run.states, target, loaded.train, drafter.layer_ids, with_last=settings.loss.soft,
        rank=rank(), world=world_size(), barrier=engine.barrier,
    )  # fmt: skip
    stream = Stream(
        usable_rows, states, budget=run.train.pack_tokens, packs=run.train.packs, seed=run.seed,
        rank=rank(), world=world_size(),
    )  # fmt: skip
    total = run.train.steps or stream.steps(run.train.epochs)
    engine.wrap(drafter)
    progress = checkpoint.load(engine, directory / "checkpoints")
    progress = progress or checkpoint.Progress(belongs=loaded.belongs)
    held = list(replay.paths(target, _spread(loaded.held, run.train.eval_rows), drafter.layer_ids))
    if rank() == 0:
        if max(path.length for path in held) < 2:
            raise ValueError(
                f"all {len(held)} held-out answers are another model's: the target leaves them within two "
                "tokens, so acceptance cannot be measured. Let the target answer them: "
                "`python -m data task=regenerate`"
            )
        if off := sum(path.off_path for path in held):
            print(
                f"{off} of {len(held)} held-out answers ({off / len(held):.0%}) leave the target's own path "
                "and are cut there; `python -m data task=regenerate` gives answers that do not"
            )
        cut(directory / "metrics.jsonl", progress.step)
    log = Log(run.log, directory, settings_of(run), total, progress.step, rank() == 0)
    return Job(drafter, engine, stream, held, directory, log, total, run.seed), progress


def _refuse_mask_token(drafter: Drafter, examples: Sequence[Example]) -> None:
    """A drafter that fills slots with a token cannot learn an answer that holds it."""
    mask_token = getattr(drafter, "mask_token", None)
    for example in examples:
        if any(i == mask_token and answered for i, answered in zip(example.ids, example.mask, strict=True)):
            raise ValueError(
                f"{example.name}: the answer holds token {mask_token}, which fills empty slots; name one "
                "that no answer holds with method.mask_token=ID"
            )


def _spread(held: Sequence[Example], number: int) -> list[Example]:
    """A part of the held-out rows that holds every domain alike."""
    by_domain: dict[str, list[Example]] = {}
    for example in held:
        by_domain.setdefault(example.domain, []).append(example)
    turns = max((len(some) for some in by_domain.values()), default=0)
    mixed = [some[at] for at in range(turns) for some in by_domain.values() if at < len(some)]
    return mixed[:number]


# What a run leaves behind -----------------------------------------------------------------------


def export(run: Run, job: Job, loaded: Loaded, progress: checkpoint.Progress) -> None:
    """The best weights as ``drafter/``, read back and compared before it gets that name."""
    drafter = job.drafter
    drafter.load_state_dict(load_file(best(job.directory, progress.best_step)))
    notes = {
        "recipe": run.method.name,
        "trained_steps": progress.best_step,
        "held_out_tau": progress.best_tau,
        "data_key": loaded.data_key,
        "versions": versions(),
        "commit": commit(),
    }
    out = job.directory / "drafter"
    with evaluating(drafter):
        directory_format.write(drafter, out, notes, check=lambda at: gate(drafter, at, loaded, job.held))


def gate(drafter: Drafter, written: Path, loaded: Loaded, held: Sequence[replay.Path]) -> None:
    """Refuse a written directory whose drafter is not the trained one: shape, tensors, logits, drafts.

    Logits at first, middle and last anchors of held-out answers are equal to 1e-5 of the largest in fp32;
    what the drafter serves there, from states that arrive as they do in serving, are its own drafts.
    """
    again = directory_format.read(written, loaded.target)
    for name, one, other in zip(SHAPE, _shape(drafter), _shape(again), strict=True):
        if one != other:
            raise ValueError(f"export refused: {name} is {one}, after reading {written} back {other}")
    trained, stored = drafter.state_dict(), again.state_dict()
    for name, value in trained.items():
        if not torch.equal(value.cpu(), stored[name].cpu()):
            raise ValueError(
                f"export refused: {name} differs from the trained tensor after reading {written} back"
            )
    for path in held[:2]:
        worst = logit_difference(drafter, again, path)
        if not worst <= 1e-5:
            raise ValueError(
                f"export refused: draft logits of {path.example.name} differ by {worst:.2g} of the largest"
            )
        worst = serving_difference(drafter, again, path)
        if not worst <= 1e-5:
            raise ValueError(
                f"export refused: drafts served in {path.example.name} are not those of training, whose "
                f"logits are higher by {worst:.2g} of the largest"
            )


SHAPE = ("layer_ids", "mask_token", "max_drafts", "vocabulary")


def _shape(drafter: Drafter) -> tuple[Any, ...]:
    kept = None if drafter.vocab is None else drafter.vocab.kept_N.tolist()
    return drafter.layer_ids, getattr(drafter, "mask_token", None), drafter.max_drafts, kept


def _anchors(drafter: Drafter, path: replay.Path) -> tuple[Batch, torch.Tensor]:
    """A held-out answer in fp32, and its first, middle and last anchor."""
    device = drafter.target.device
    last = path.first + max(path.length, 1) - 1
    anchors_A = torch.tensor(sorted({path.first, (path.first + last) // 2, last}), device=device)
    return pack([path.example], [path.states]).to(device, torch.float32), anchors_A


@torch.inference_mode()
def logit_difference(one: Drafter, other: Drafter, path: replay.Path) -> float:
    """The largest difference between two drafters' draft logits, as a share of the largest logit."""
    batch, anchors_A = _anchors(one, path)
    logits = [d.float().draft_logits(batch, anchors_A, d.max_drafts) for d in (one, other)]
    return float((logits[0] - logits[1]).abs().max() / logits[0].abs().max())


@torch.inference_mode()
def serving_difference(one: Drafter, other: Drafter, path: replay.Path) -> float:
    """How far the logits, in ``one``, of what ``other`` serves are below those of ``one``'s own drafts.

    A share of the largest logit: 0 where the drafts are the same, rounding where two logits tie.
    """
    batch, anchors_A = _anchors(one, path)
    num = one.max_drafts
    state, done, served = other.begin(1, len(path.example.ids) + num), 0, []
    for anchor in anchors_A.tolist():
        new = slice(done, anchor)
        other.advance(state, range(1), batch.states[:, new], batch.tokens_BT[:, new], [anchor - done])
        served.append(other.propose(state, range(1), batch.tokens_BT[0, [anchor]], num).tokens_BK)
        done = anchor
    served_AK = torch.cat(served)
    if torch.equal(served_AK, one.drafts(batch, anchors_A, num).tokens_BK):
        return 0.0
    logits_AKN = one.draft_logits(batch, anchors_A, num)
    ids_AK = served_AK if one.vocab is None else one.vocab.draft_id_V.to(served_AK.device)[served_AK]
    below_AK = logits_AKN.amax(-1) - logits_AKN.gather(-1, ids_AK[..., None])[..., 0]
    return float(below_AK.max() / logits_AKN.abs().max())


def write_report(run: Run, job: Job, loaded: Loaded) -> None:
    """Acceptance of the exported directory, read back, on all held-out rows; tau goes into its config."""
    drafter = job.directory / "drafter"
    again = directory_format.read(drafter, loaded.target)
    found = evaluate(loaded.target, again, loaded.held, run.eval, run.seed)
    found = {"target": found["target"], "drafter": str(drafter), **found}
    directory_format.note(drafter, tau_by_n=found["overall"]["tau_by_n"])
    report.replace_file(drafter / "README.md", card(run, found).encode())
    report.write(found, job.directory / "report")
    print(report.table(found))
    print(f"report: {job.directory / 'report' / 'report.html'}")


def card(run: Run, found: dict[str, Any]) -> str:
    """README.md of a drafter directory: what it is for, what it accepts, how to serve it."""
    most = found["max_n"]
    lines = [
        f"# A {found['method']} drafter for {run.target}",
        "",
        f"Trained by Foredraft {directory_format.own_version()}. Held-out answers of the target,",
        f"temperature {found['temperature']}, N = {most}:",
        "",
        "| domain | prompts | tau | 95 % interval | survival by position |",
        "|---|---|---|---|---|",
    ]
    for name, row in [*found["domains"].items(), ("overall", found["overall"])]:
        low, high = row["tau_ci95"]
        curve = " ".join(f"{x:.3f}" for x in row["survival"])
        lines.append(f"| {name} | {row['prompts']} | {row['tau']:.3f} | {low:.3f} to {high:.3f} | {curve} |")
    lines += ["", "```", f"python -m serve target={run.target} drafter=DIR prompt_file=question.txt"]
    vllm = directory_format.read_config(Path(found["drafter"]))["foredraft"]["vllm"]
    if vllm["servable"]:
        target = "TARGET" if run.target == EMBEDDED else run.target
        speculative = json.dumps({"method": found["method"], "model": "DIR", "num_speculative_tokens": most})
        lines.append(f"vllm serve {target} --speculative-config '{speculative}'")
    lines.append("```")
    if not vllm["servable"]:
        lines += ["", f"Not for vLLM: {vllm['why']}."]
    elif run.target == EMBEDDED:
        lines += ["", "TARGET: the directory that `drafters.target.embedded_directory()` returns."]
    return "\n".join(lines) + "\n"
