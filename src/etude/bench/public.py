"""Public benchmarks: an agent works in a task's own image, the benchmark's verifier decides, and results are written in its format.

SWE-bench: what the agent changed is taken as a patch (whatever it did to git), applied in a fresh container of the image as the
benchmark's harness applies it, and `eval.sh` is run there. `logs/run_evaluation/` has patch.diff, test_output.txt and report.json of
every attempt where that harness looks for them; beside it lie predictions and the run's report. Harbor: `tests/test.sh` runs where
the agent worked, or in a fresh container with its artifacts where the task says so; its reward files are kept under `harbor/`.

A container that cannot be started makes an attempt invalid. Everything else counts as the agent's result, a verifier without output
included.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import shlex
import shutil
import tarfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.agent.calls import Call
from etude.agent.harness import SYSTEM, Harness
from etude.agent.policies import ScriptedPolicy
from etude.agent.trace import Trace
from etude.bench.agents import CONTEXT, TRACES, Attempt, BenchSettings, CodeBenchmark, Policies
from etude.bench.axes import effort, vector
from etude.bench.trials import Trial, read_results
from etude.errors import UserError
from etude.files import digest_of, read_json, write_json, write_text
from etude.rewards.interaction import interaction
from etude.sandbox import images
from etude.sandbox.box import SandboxError
from etude.sandbox.image import LIMITS, ImageSandbox
from etude.sandbox.local import ENGINES
from etude.tasks.attempt import PunctualToolset
from etude.tasks.manifest import TaskSet
from etude.tasks.public import PublicTask, outcomes, passing, read_public

if TYPE_CHECKING:
    from collections.abc import Sequence

    from etude.tasks.task import Task

TREE = "export GIT_INDEX_FILE=/tmp/.etude-index; rm -f $GIT_INDEX_FILE; git add -A . && git write-tree"
APPLY = ("git apply --verbose", "git apply --verbose --reject", "patch --batch --fuzz=5 -p1 -i")
FRESH = "git checkout -- . ; git clean -fd"
PATCH, EVAL = "/tmp/patch.diff", "/eval.sh"  # noqa: S108 - of a container
EVALUATION = 1800.0  # seconds, as the benchmark's harness has it
RUNS = Path("logs", "run_evaluation")
INTEGRITY = {
    "policy": "public 1",
    "network": "none, or the engine's where a task asks for one",
    "scoring": "the benchmark's own verifier: SWE-bench's in a fresh container, Harbor's as the task says",
}


@dataclass(frozen=True)
class PublicSet(TaskSet):
    """Tasks of public benchmarks as a set."""

    public: dict[str, PublicTask] = field(default_factory=dict)


def public_set(path: Path, only: str = "") -> PublicSet:
    """Read the tasks of a folder; its digest is of all their files."""
    found = read_public(path, only)
    files = [[each.id, sorted([p.relative_to(each.folder).as_posix(), digest_of(p.read_bytes().hex())]
              for p in each.folder.rglob("*") if p.is_file())] for each in found]  # fmt: skip
    public = {each.id: each for each in found}
    return PublicSet(path.absolute().name, digest_of(files), tuple(each.task() for each in found), {}, public)


def engine_of(sandbox: str) -> str:
    """Return the engine that a setting names, or the first there is."""
    engine, _, image = sandbox.partition(":")
    if image or engine not in {*ENGINES, "auto"}:
        raise UserError(f'sandbox = "{sandbox}": public tasks name their own images; say podman, docker or auto')
    there = next((each for each in ENGINES if shutil.which(each)), "") if engine == "auto" else engine
    if not there:
        raise UserError("public benchmarks run in containers, and there is neither podman nor docker; install one")
    return there


@dataclass(frozen=True)
class Verdict:
    """What a verifier says."""

    resolved: bool
    why: str = ""
    passed: dict[str, int] = field(default_factory=dict)
    expected: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """One attempt at a task, with its policy, image and trace."""

    policies: Policies
    attempt: Attempt
    task: PublicTask
    engine: str
    image: str
    trace: Trace


class PublicBenchmark(CodeBenchmark):
    """One agent at all tasks."""

    task_set: PublicSet

    @classmethod
    async def rules(cls, settings: BenchSettings) -> dict[str, Any]:
        return {**INTEGRITY, "sandbox": engine_of(settings.sandbox)}

    @classmethod
    def about(cls, tasks: Sequence[Task], prompts: dict[str, str]) -> dict[str, float]:
        lengths = sorted(map(len, prompts.values()))
        return {"tasks": len(tasks), "packages": len({task.package for task in tasks}),
                "median characters of a prompt": lengths[len(lengths) // 2]}  # fmt: skip

    async def _scored(self, policies: Policies, attempt: Attempt) -> tuple[Trial, Trace]:
        task = self.task_set.public[attempt.task.id]
        engine = engine_of(self.settings.sandbox)
        image = await asyncio.to_thread(images.digest, engine, task.image or str(task.build), task.build)
        trace = Trace(f"{attempt.agent.name}:{task.id}:{attempt.number}", task.request)
        trace.made_by |= {"sandbox": f"{engine}:{image}", "suite": task.suite, "image": task.image}
        job = Job(policies, attempt, task, engine, image, trace)
        try:
            seen = await (self._swebench(job) if task.suite == "swebench" else self._harbor(job))
        except UserError as error:  # of the policy or of an image, and neither is to be tried again
            raise SandboxError(str(error)) from error
        trace.rewards = {"pass": float(seen.resolved)}
        outcome, interacted = "pass" if seen.resolved else "fail", vector(interaction(trace, None))
        measured = {"passed": seen.passed, "expected": seen.expected, "interaction": interacted, **effort(trace)}
        return attempt.trial(outcome=outcome, trace=f"{TRACES}#{trace.id}", **measured), trace

    async def _work(self, job: Job, box: ImageSandbox, solve: str, seconds: float = math.inf) -> None:
        """Have the agent work in a container. `solve`: the command that puts the benchmark's own solution in place."""
        agent = job.attempt.agent
        policy, talk = job.policies(job.attempt.task)
        if agent.probe:
            tool = "shell" if "shell" in self.settings.tools.tools else "bash"
            call = talk.write(Call(tool, {"command": solve, "timeout": 600}))
            turns = [call, "The reference is in place."] if agent.name == "oracle" else []
            policy = ScriptedPolicy(turns, talk, context=CONTEXT)
        bounded = agent.bounded(self.settings.harness)
        bounded = bounded.model_copy(update={"seconds": min(bounded.seconds, seconds)})
        tools = PunctualToolset(box, self.settings.tools, self.searcher)
        harness = Harness(policy, talk, tools, bounded, job.trace, seed=job.attempt.seed)
        tools.until = harness.began + bounded.seconds
        await harness.run(SYSTEM, job.trace.task)

    async def _swebench(self, job: Job) -> Verdict:
        task, attempt, trace = job.task, job.attempt, job.trace
        env = {"BASH_ENV": "/root/.bashrc"}  # where the images activate their environment
        async with ImageSandbox.opened(job.engine, job.image, root=task.root, env=env) as box:
            before = await _said(box, TREE)
            if attempt.agent.name == "oracle":
                await box.put(task.folder / "gold.patch", "/tmp/gold.patch")  # noqa: S108 - of the container
            await self._work(job, box, "git apply /tmp/gold.patch && rm /tmp/gold.patch")
            after = await _said(box, TREE)
            patch = (await box.exec(["git", "diff", "--binary", before, after])).out.decode(errors="surrogateescape")
        trace.diff = patch.encode(errors="replace").decode()
        folder = self.folder / RUNS / f"etude-{attempt.number}" / _plain(attempt.agent.name) / task.id
        write_text(folder / "patch.diff", trace.diff)
        async with ImageSandbox.opened(job.engine, job.image, root=task.root) as box:
            why = await _apply(box, trace.diff) if patch else ""
            done = None if why else await _evaluate(box, task)
        log = done.decode(errors="replace") if done is not None else why
        write_text(folder / "test_output.txt", log)
        report = graded(task, log, applied=not why)
        write_json(folder / "report.json", {task.id: report})
        expected = {"fail_to_pass": len(task.fail_to_pass), "pass_to_pass": len(task.pass_to_pass)}
        ended = report.get("tests_status", {})
        passed = {name: len(ended[name.upper()]["success"]) if ended else 0 for name in expected}
        return Verdict(report["resolved"], why, passed, expected)

    async def _harbor(self, job: Job) -> Verdict:
        task, attempt = job.task, job.attempt
        environment, agent, verifier = map(task.table, ("environment", "agent", "verifier"))
        memory = int(float(environment.get("memory_mb") or LIMITS.memory >> 20)) << 20
        limits = replace(LIMITS, memory=memory, cpus=float(environment.get("cpus") or 1))
        mode = environment.get("network_mode") or (environment.get("allow_internet", True) or "no-network")
        about: dict[str, Any] = {"network": mode != "no-network", "root": task.root, "limits": limits}
        about["env"] = {key: str(value) for key, value in environment.get("env", {}).items()}
        folder = self.folder / "harbor" / _plain(attempt.agent.name) / f"{task.id}__{attempt.number}" / "verifier"
        async with ImageSandbox.opened(job.engine, job.image, **about) as box:
            if attempt.agent.name == "oracle":
                await box.put(task.folder / "solution", "/solution")
            variables = task.table("solution").get("env", {}).items()
            words = [*(f"{key}={shlex.quote(str(value))}" for key, value in variables), "bash /solution/solve.sh"]
            await self._work(job, box, " ".join(words), float(agent.get("timeout_sec") or math.inf))
            if verifier.get("environment_mode") != "separate":
                return await _rewarded(box, task, folder)
            kept = [await box.get(str(place)) for place in task.about.get("artifacts", [])]
        async with ImageSandbox.opened(job.engine, job.image, **about) as box:
            for artifact in filter(None, kept):
                if (done := await box.exec(["tar", "-x", "-f", "-", "-C", "/", "--no-same-owner"], stdin=artifact)).rc:
                    raise SandboxError(f"an artifact does not fit: {done.err.decode(errors='replace')[-300:]}")
            return await _rewarded(box, task, folder)


def _plain(model: str) -> str:
    return model.replace("/", "__")


async def _said(box: ImageSandbox, command: str) -> str:
    done = await box.exec(command)
    if done.rc:
        raise SandboxError(f"{command[-40:]!r} in the container: {done.err.decode(errors='replace')[-300:]}")
    return done.out.decode().strip()


async def _apply(box: ImageSandbox, patch: str) -> str:
    """Apply a patch as the benchmark's harness does; say why not."""
    await box.exec(["sh", "-c", f"cat > {PATCH}"], stdin=patch.encode())
    for number, command in enumerate(APPLY):
        if number:
            await box.exec(FRESH)
        if not (done := await box.exec(f"{command} {PATCH}")).rc:
            return ""
    if not (await box.exec(f"git apply --check --reverse {PATCH}")).rc:
        return ""
    return f">>>>> Patch Apply Failed:\n{(done.out + done.err).decode(errors='replace')[-2000:]}"


async def _evaluate(box: ImageSandbox, task: PublicTask) -> bytes:
    await box.exec(["sh", "-c", f"cat > {EVAL}"], stdin=task.text("eval.sh").encode())
    done = await box.exec(["bash", "-c", f"exec 2>&1; bash {EVAL}"], timeout=EVALUATION)
    return done.out + (b"\n>>>>> Tests Timed Out\n" if done.timed_out else b"")


def graded(task: PublicTask, log: str, *, applied: bool) -> dict[str, Any]:
    """Return the report of one attempt, as the benchmark's harness writes it."""
    tests = outcomes(log, task.about["log_parser"]) if applied else {}
    report: dict[str, Any] = {"patch_is_None": False, "patch_exists": True, "patch_successfully_applied": bool(tests)}
    status, right = {}, bool(tests)
    for name, wanted in (("FAIL_TO_PASS", task.fail_to_pass), ("PASS_TO_PASS", task.pass_to_pass)):
        good = {*passing(tests, wanted, kept=name == "PASS_TO_PASS")}
        right &= good >= {*wanted}
        kinds = (("success", good), ("failure", {*wanted} - good))
        status[name] = {kind: [each for each in wanted if each in those] for kind, those in kinds}
    report |= {"resolved": right, **({"tests_status": status} if tests else {})}
    return report


async def _rewarded(box: ImageSandbox, task: PublicTask, folder: Path) -> Verdict:
    """Run Harbor's verifier, and keep what it writes."""
    verifier = task.table("verifier")
    await box.exec("rm -rf /tests")
    await box.put(task.folder / "tests", "/tests")
    env = {key: str(value) for key, value in verifier.get("env", {}).items()}
    command = "rm -rf /logs/verifier && mkdir -p /logs/verifier && exec 2>&1; bash /tests/test.sh"
    done = await box.exec(["sh", "-c", command], timeout=float(verifier.get("timeout_sec") or 600), env=env)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "test-stdout.txt").write_bytes(done.out)
    with tarfile.open(fileobj=io.BytesIO(await box.get("/logs/verifier") or _EMPTY)) as tar:
        for member in tar.getmembers():
            if member.isfile() and (name := Path(member.name).name) in {"reward.txt", "reward.json"}:
                (folder / name).write_bytes(tar.extractfile(member).read())  # type: ignore[union-attr]
    reward, why = _reward(folder)
    passed = reward >= 1.0
    return Verdict(passed, why or "out of time" * done.timed_out, {"reward": int(passed)}, {"reward": 1})


def _reward(folder: Path) -> tuple[float, str]:
    try:
        if (file := folder / "reward.json").exists():
            given = read_json(file)
            return float(given["reward"] if "reward" in given else min(given.values())), ""
        return float((folder / "reward.txt").read_text()), ""
    except (OSError, ValueError, TypeError, KeyError) as error:
        return 0.0, f"no reward: {type(error).__name__}"


def _empty_tar() -> bytes:
    with io.BytesIO() as file:
        tarfile.open(fileobj=file, mode="w").close()
        return file.getvalue()


_EMPTY = _empty_tar()


def write_runs(folder: Path, task_set: PublicSet) -> list[Path]:
    """Write the predictions and the report of every run, as SWE-bench's harness does; return the files."""
    wanted, written = sorted(each.id for each in task_set.public.values() if each.suite == "swebench"), []
    trials = {(t.model, t.number, t.task): t for t in read_results(folder).trials if t.task in wanted}
    for model, number in sorted({(model, number) for model, number, _ in trials}):
        run, name = f"etude-{number}", _plain(model)
        own = {task: trials[model, number, task] for task in wanted if (model, number, task) in trials}
        patches = {task: folder / RUNS / run / name / task / "patch.diff" for task in own}
        texts = {task: path.read_text(encoding="utf-8") for task, path in patches.items() if path.exists()}
        rows = [{"instance_id": task, "model_name_or_path": model, "model_patch": text} for task, text in texts.items()]
        sets = {"completed": [t for t, text in texts.items() if text], "resolved": [t for t in texts if own[t].outcome == "pass"],
                "unresolved": [t for t, text in texts.items() if text and own[t].outcome == "fail"],
                "empty_patch": [t for t, text in texts.items() if not text], "error": sorted({*own} - {*texts})}  # fmt: skip
        report: dict[str, Any] = {"total_instances": len(wanted), "submitted_instances": len(own), "schema_version": 2}
        report |= {f"{kind}_instances": len(ids) for kind, ids in sets.items()}
        report |= {f"{kind}_ids": ids for kind, ids in sets.items()}
        report |= {"incomplete_ids": sorted({*wanted} - {*own}), "submitted_ids": sorted(own)}
        target = folder / f"{name}.{run}.predictions.jsonl"
        write_text(target, "".join(json.dumps(row) + "\n" for row in rows))
        write_json(folder / f"{name}.{run}.json", report)
        written += [target, folder / f"{name}.{run}.json"]
    return written
