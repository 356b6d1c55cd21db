"""The `sft` stage: learn from conversations, and only from what the assistant wrote in them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from etude.data.chat import ChatTemplate, choose_template, conversations_from_code, pack_chat, read_conversations, split
from etude.data.codebase import read_codebase
from etude.data.filters.contamination import read_tasks
from etude.data.filters.licence import canonical
from etude.data.heldout import choose_heldout
from etude.data.loader import Batch, Corpus, Loader
from etude.data.sources import identify_source
from etude.errors import UserError
from etude.files import digest_of, files_below, link_or_copy, sha256_file
from etude.models.load import load_tokeniser, tell_apart
from etude.models.shape import model_shape
from etude.progress import counted
from etude.questions.demos import QuestionDemoSettings, demonstrate
from etude.run.folder import MODEL
from etude.run.stage import Job, Outcome, code_used, file_used
from etude.run.stages.training import TrainingStage
from etude.sandbox import images
from etude.tasks.demos import DemoSettings, licences_of, make_demos, read_samples, refuse_benchmarks, tokeniser_digest
from etude.tasks.manifest import find_manifest, picked, read_rows
from etude.tasks.repairs import ACCOUNT, TalkSettings, benchmark_packages, licences_of_talks, make_talks
from etude.training.settings import JointMtpSettings, LoraSettings, OptimiserSettings, TrainSettings, mtp_or_lora

if TYPE_CHECKING:
    from etude.lineage.record import DataUse
    from etude.run.train import Training
    from etude.training.distributed import World
    from etude.training.measure import Bits
    from etude.training.run import Evaluate
    from etude.training.session import Session
    from etude.work import Work

CONTEXT = 2048  # longest default row
DEMOS, QUESTIONS, REPAIRS = "demos", "questions", "repairs"  # the folders they are made in


class SftSettings(TrainSettings):
    """Supervised fine-tuning."""

    tokens: int | None = Field(default=None, ge=1, description="budget of training tokens, instead of epochs")  # type: ignore[assignment]
    epochs: float = Field(default=2.0, gt=0, description="passes over the conversations, if tokens is not set")
    length: int | None = Field(default=None, ge=16, description="tokens in a row; default 2048, or the context")
    conversations: list[str] = Field(default=[], description="JSONL files of conversations in OpenAI's form")
    traces: list[str] = Field(default=[], description="JSONL files of episodes, from `etude tasks demos`")
    demos: DemoSettings | None = Field(default=None, description="demonstrations to make and train on")
    questions: QuestionDemoSettings | None = Field(default=None, description="question sets to answer and train on")
    repairs: TalkSettings | None = Field(default=None, description="repairs to make of code and train on")
    code: str | None = Field(default=None, description="folder of Python code to make conversations from")
    licence: str | None = Field(default=None, description="SPDX expression of `conversations` and `code`")
    template: str = Field(default="auto", description="chat template: auto (base or chatml), base, chatml, a .jinja")
    redraw: bool = Field(default=True, description="re-initialise embeddings of special tokens the base never saw")
    too_long: Literal["drop", "cut"] = Field(default="drop", description="handling of conversations over a row")
    heldout: float = Field(default=0.05, ge=0, lt=1, description="share of the conversations that is held out")
    batch: int = Field(default=16, ge=1, description="batch: rows a step, over all devices")
    optimiser: OptimiserSettings = OptimiserSettings(lr=1e-4, weight_decay=0.0)
    lora: LoraSettings | None = Field(default=None, description="LoRA: train low-rank adapters only")
    mtp: JointMtpSettings | None = Field(default=None, description="train the parent's MTP heads jointly")

    @model_validator(mode="after")
    def _has_data(self) -> SftSettings:
        mtp_or_lora(self)
        if not (self.conversations or self.traces or self.demos or self.questions or self.repairs or self.code):
            ways = (
                "name `conversations` or `traces` (JSONL files), `demos`, `questions`, `repairs` or a folder of `code`"
            )
            raise ValueError(f"nothing to train on; {ways}")
        if self.shares:
            raise ValueError("`shares` has no effect here: the corpus is only measured on")
        if self.tokens and self.epochs != SftSettings.model_fields["epochs"].default:
            raise ValueError("`epochs` has no effect beside `tokens`; leave one of them out")
        return self


class SftStage(TrainingStage):
    """Trains on conversations."""

    kind = "sft"
    settings = SftSettings
    learns_corpus = False

    def check(self, settings: SftSettings) -> None:
        """Refuse files that are not there, or not what they should be: stages before this one may take days."""
        _refuse_sources(settings)
        if settings.template not in {"auto", "base", "chatml"} and not Path(settings.template).is_file():
            named = f"sft.template {settings.template!r}"
            raise UserError(f'{named} is not "auto", "base", "chatml" or a file (looked in {Path.cwd()})')
        if settings.licence and canonical(settings.licence) is None:
            raise UserError(f"sft.licence: {settings.licence!r} is not an SPDX expression, such as Apache-2.0 or MIT")

    def inputs(self, settings: SftSettings, parent_digest: str | None, seed: int) -> dict[str, Any]:
        """Return settings, and the conversations, code and template by content."""
        files = [*settings.conversations, *settings.traces]
        files += [settings.template] if Path(settings.template).is_file() else []
        files += [settings.demos.tasks] if settings.demos else []
        content = [sha256_file(Path(name).expanduser()) for name in files]
        content += [read_codebase(Path(settings.code).expanduser()).digest] if settings.code else []
        content += [settings.questions.read().digest] if settings.questions else []
        inputs = super().inputs(settings, parent_digest, seed)
        content += [digest_of(_identity(settings.repairs))] if settings.repairs else []
        paths = {"conversations", "traces", "code", "demos", "questions", "repairs"}
        kept = {k: v for k, v in inputs["settings"].items() if k not in paths}
        if settings.demos:
            kept["demos"] = _decides(settings.demos)
        if settings.questions:
            kept["questions"] = settings.questions.model_dump(mode="json", exclude={"tasks"})
        return {**inputs, "settings": kept, "content": content}

    def run(self, settings: SftSettings, job: Job) -> Outcome:
        """Make the demonstrations that are missing, and train: on those of this stage as on any other traces."""
        if settings.demos:
            tokeniser, work = load_tokeniser(job.model.folder), job.work
            choose_template(tokeniser, settings.template)
            # Beside the work folders of all settings: what decides the demonstrations is not all that decides the training.
            decides = sha256_file(Path(settings.demos.tasks).expanduser()), tokeniser_digest(tokeniser), job.seed
            key = digest_of([*decides, _decides(settings.demos)])[:16]
            place = work.folder.parent / f".{DEMOS}-{key}"
            made, _ = make_demos(settings.demos, tokeniser, place, work.cache, work.reporter, job.seed)
            link_or_copy(made, work.folder / DEMOS / made.name)
            settings = settings.model_copy(
                update={"traces": [*settings.traces, str((work.folder / DEMOS / made.name).absolute())]}
            )
        if settings.questions:
            tokeniser = load_tokeniser(job.model.folder)
            choose_template(tokeniser, settings.template)
            made = job.work.folder.absolute() / QUESTIONS / settings.questions.path.name
            demonstrate(settings.questions, tokeniser, tokeniser_digest(tokeniser), made, job.work.reporter.say)
            settings = settings.model_copy(update={"traces": [*settings.traces, str(made)]})
        if settings.repairs:
            work = job.work
            place = work.folder.parent / f".{REPAIRS}-{digest_of([*_identity(settings.repairs), job.seed])[:16]}"
            file = make_talks(settings.repairs, place, work.cache, work.reporter, job.seed)
            for each in (file, file.with_name(ACCOUNT)):
                link_or_copy(each, work.folder / REPAIRS / each.name)
            made_of = str((work.folder / REPAIRS / file.name).absolute())
            settings = settings.model_copy(update={"conversations": [*settings.conversations, made_of]})
        return super().run(settings, job)

    def train(self, training: Training, world: World, work: Work | None) -> None:
        """Train on this rank."""
        import torch

        from etude.run.train import joint_objective, open_corpus, train_and_report
        from etude.training.measure import acceptance

        settings: SftSettings = training.settings
        tokeniser = load_tokeniser(training.parent)
        template = choose_template(tokeniser, settings.template)
        if template.added and settings.lora:
            raise UserError(
                f"chat template {template.name!r} adds {template.added} tokens, whose embeddings lora would never train;"
                " leave lora out, or use a template whose tokens the base knows"
            )
        model = training.parent_model()
        if len(tokeniser) > len(known := model.get_input_embeddings().weight):
            torch.manual_seed(training.seed)
            model.resize_token_embeddings(len(tokeniser), mean_resizing=not known.is_meta)  # another rank has them
        length = settings.length or min(CONTEXT, model_shape(training.parent).context)
        chats, notes = _packed(settings, template, length, training.seed)
        notes += _untrained(settings, model, tokeniser, chats, training.seed)
        corpus = open_corpus(training, training.parent) if training.corpus else None
        tokens = settings.tokens or max(1, round(settings.epochs * len(chats.splits["train"]["chat"]) * length))
        training = replace(training, settings=settings.model_copy(update={"tokens": tokens}))
        heldout = list(chats.heldout("chat", rows=settings.evaluation_rows)) if chats.splits.get("heldout") else []
        loader = Loader(
            chats, seed=training.seed, batch=settings.batch, rank=world.rank // settings.context_ranks,
            world=max(1, world.size // settings.context_ranks), workers=settings.loader_workers,
        )  # fmt: skip

        def accepted(session: Session) -> dict[str, Any]:
            if not (settings.mtp and heldout):
                return {}
            rates = acceptance(session.accepted, heldout, session.micro, session.device)
            return {"acceptance": {"chat answers": rates}}

        if world.leads:
            tokeniser.save_pretrained(training.folder / MODEL)
        model.generation_config.eos_token_id = template.end_token  # where generation stops
        if work:
            for note in notes:
                work.reporter.say(f"sft: {note}")
        train_and_report(
            training, world, work, model, loader, length, _measurement(settings, heldout, tokeniser, corpus), accepted,
            objective=joint_objective(training, model),
            notes=[f"chat template: {template.name}; {template.added} tokens added", *notes],
        )  # fmt: skip

    def data_uses(self, settings: SftSettings, job: Job, seen: dict[str, float]) -> list[DataUse]:  # noqa: ARG002 - as its parent's
        """Return the files and the code that conversations came from."""
        uses = []
        for name in [*settings.conversations, *settings.traces]:
            path = Path(name).expanduser()
            known = licences_of(path) if name in settings.traces else _stated(settings, path.stat().st_size)
            if settings.repairs and path.parent == job.work.folder.absolute() / REPAIRS:
                uses.append(file_used(path, "repairs", licences_of_talks(path)))
                continue
            use = file_used(path, path.name, known)
            if settings.demos and path.parent == job.work.folder.absolute() / DEMOS:  # a place that is soon another
                tasks = Path(settings.demos.tasks).expanduser()
                named, source = f"demonstrations of {tasks.name}", f"made from file {tasks.absolute()}"
                use = use.model_copy(update={"name": named, "source": source})
            if settings.questions and path.parent == job.work.folder.absolute() / QUESTIONS:
                source = f"made from file {settings.questions.path.absolute()}"
                use = use.model_copy(update={"name": f"answers to {path.name}", "source": source})
            uses.append(use)
        if settings.code:
            folder = Path(settings.code).expanduser()
            code = read_codebase(folder)
            uses.append(code_used(folder, code, _stated(settings, code.bytes)))
        return uses


def _refuse_sources(settings: SftSettings) -> None:
    """Refuse conversations that are not there, and what none can be made of."""
    for field in ("conversations", "traces"):
        for name in getattr(settings, field):
            if not Path(name).expanduser().is_file():
                raise UserError(f"sft.{field}: {name!r} is not a file (looked in {Path.cwd()})")
    for name in settings.conversations:
        read_conversations(Path(name).expanduser())
    if settings.demos:
        manifest = find_manifest(settings.demos.tasks, "sft.demos.tasks")
        refuse_benchmarks(manifest)
        picked(f"sft.demos: {manifest}", read_rows(manifest)[2], settings.demos.only)
    if settings.questions:
        settings.questions.read()
    if settings.repairs:
        _identity(settings.repairs)
    if settings.code:
        read_codebase(Path(settings.code).expanduser())


def _identity(repairs: TalkSettings) -> list[Any]:
    """Return what decides the repairs that are made; refuse sources and tasks that are not there."""
    tasks = [Path(name).expanduser() for name in repairs.contamination.tasks]
    read_tasks(tasks)
    benchmark_packages(tasks)
    made = [find_manifest(repairs.tasks, "sft.repairs.tasks")] if repairs.tasks else []
    for manifest in made:
        refuse_benchmarks(manifest)
    made += [find_manifest(repairs.apart, "sft.repairs.apart")] if repairs.apart else []
    files = [file for path in tasks for file in ([path] if path.is_file() else files_below(path))] + made
    settings = repairs.model_dump(mode="json", exclude={"contamination": {"tasks"}})
    return [settings, [identify_source(each) for each in repairs.source], [sha256_file(file) for file in files]]


def _stated(settings: SftSettings, size: int) -> dict[str, int]:
    licence = canonical(settings.licence or "")
    return {licence: size} if licence else {}


def _packed(settings: SftSettings, template: ChatTemplate, length: int, seed: int) -> tuple[Corpus, list[str]]:
    """Return the conversations in rows, and what became of them, in words."""
    every = [each for name in settings.conversations for each in read_conversations(Path(name).expanduser())]
    notes = []
    if settings.code:
        made, counts = conversations_from_code(read_codebase(Path(settings.code).expanduser()), seed=seed)
        every += made
        notes.append(f"made from {settings.code}: {counted(counts)}")
    parts = zip(("train", "heldout"), split(every, settings.heldout, seed), strict=True)
    encoded = {name: [each for chat in chats for each in template.encode(chat)] for name, chats in parts}
    episodes = [each for name in settings.traces for each in read_samples(Path(name).expanduser(), template.tokeniser)]
    held = choose_heldout({"chat": Counter(package for package, _ in episodes)}, settings.heldout, seed)
    for package, episode in episodes:
        encoded["heldout" if package in held else "train"].append(episode)
    chats, became = pack_chat(
        encoded, length=length, separator=template.end_token, vocabulary=len(template.tokeniser), too_long=settings.too_long
    )  # fmt: skip
    notes += [f"{name}: {counted(counts)}" for name, counts in became.items() if counts]
    return chats, notes


def _untrained(settings: SftSettings, model: Any, tokeniser: Any, chats: Corpus, seed: int) -> list[str]:
    """Tell apart the special tokens in the conversations that the base never learnt; say which, or that it was not done."""
    places = [series[index] for series in chats.splits["train"].values() for index in range(len(series))]
    in_use = {token for _, shard, index in places for token in shard.row(index).tokens.tolist()}
    # An adapter is applied to the base's own weights, so these stay as they are.
    draw = settings.redraw and not settings.lora
    untrained = tell_apart(model, tokeniser.added_tokens_decoder, in_use, seed, draw=draw)
    done = "drawn anew" if draw else "left as they are, so that it can hardly tell them apart"
    named = ", ".join(tokeniser.convert_ids_to_tokens(untrained))
    return [f"special tokens the base never learnt, their embeddings {done}: {named}"] if untrained else []


def _measurement(settings: SftSettings, heldout: list[Batch], tokeniser: Any, corpus: Corpus | None) -> Evaluate:
    """Return what measures the answers of held-out conversations, and the run's corpus for what was forgotten."""
    from etude.training.measure import bits, bits_by_domain

    rows = settings.evaluation_rows
    learnt = [batch.tokens[batch.learnt].tolist() for batch in heldout]
    size = sum(len(tokeniser.decode(tokens).encode()) for tokens in learnt)
    ratio = size / max(1, sum(map(len, learnt)))  # bytes of text behind a learnt token

    def measure(session: Session) -> dict[str, Bits]:
        nats, device = session.nats, session.device
        answers = {"chat answers": bits(nats, heldout, ratio, session.micro, device)} if heldout else {}
        if corpus is None:
            return answers
        # The longest rows that the corpus's can be cut into, up to those trained on.
        length = next(size for size in range(min(session.length, corpus.length), 0, -1) if corpus.length % size == 0)
        micro = max(1, session.micro * session.length // length)
        return answers | bits_by_domain(nats, corpus, length=length, rows=rows, micro=micro, device=device)

    return measure


def _decides(demos: DemoSettings) -> dict[str, Any]:
    """Return the settings that decide what is demonstrated."""
    return demos.model_dump(mode="json", exclude={"tasks", "sandbox"}) | images.decides(demos.sandbox)
