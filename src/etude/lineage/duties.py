"""What the licences of all ancestors ask of a product: each clause fires, does not, or asks a question.

A rule is found by the text that came with the weights, never by a name or a tag. Facts that `product.toml` does not state
are unknown, not false: whatever hangs on one asks for it (three-valued logic); the description of each fact is the question.
Who, what for and when are asked by no clause: the model card prints them. Facts for engineering, not legal advice.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import BaseModel, Field, ValidationError, model_validator

from etude.errors import UserError, nearest
from etude.lineage import licences
from etude.lineage.facts import edges, in_order, is_notice
from etude.lineage.licences import OWN, duty_text, folder_name, held, is_proprietary, obligations
from etude.lineage.record import LINEAGE_FILE, Lineage, Record, load_lineage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path


UNION = {"AT", "BE", "BG", "CY", "CZ", "DE", "DK", "EE", "ES", "FI", "FR", "GR", "HR", "HU", "IE", "IT", "LT", "LU", "LV", "MT",
         "NL", "PL", "PT", "RO", "SE", "SI", "SK"}  # the EU  # fmt: skip


def _ask(question: str, **bounds: Any) -> Any:
    return Field(default=None, description=question, **bounds)


class Facts(BaseModel, extra="forbid", strict=True, allow_inf_nan=False, frozen=True):
    """Unknown keys and wrong types are refused."""


class Organisation(Facts):
    """Who offers the product, with all its affiliates."""

    name: str | None = _ask("Who provides the model?")
    contact: str | None = _ask("How is the provider reached?")
    country: str | None = _ask("In which country is your principal place of business (ISO code, such as DE)?")
    monthly_revenue: float | None = _ask("What is the group's revenue a month, of everything, in USD?", ge=0)
    yearly_revenue: float | None = _ask("What was the group's highest revenue in 12 months, in USD?", ge=0)
    model_service: bool | None = _ask("Does the group sell access to models (inference, fine-tuning) as a service?")
    model_service_or_work_assistant: bool | None = _ask("Does it sell access to models, or an AI assistant for work?")
    users_in_month: dict[str, int] | None = _ask("How many monthly active users had the whole group in {month}?")


class Product(Facts):
    """The product a model goes into; in the file, all but `organisation` stands in the table `product`."""

    model_name: str | None = _ask("What is the model called in public?")
    intended_use: str | None = _ask("What is the model meant for?")
    release_date: str | None = _ask("When was or will it be released (such as 2026-12-01)?")
    commercial: bool | None = _ask("Is the model used in a commercial product or service?")
    distributed: bool | None = _ask("Do others receive the weights?")
    hosted: bool | None = _ask("Do others use the model through a product or service, without receiving the weights?")
    monthly_users: int | None = _ask("How many monthly active users has the product?", ge=0)
    monthly_revenue: float | None = _ask("What is the product's revenue a month, in USD?", ge=0)
    yearly_revenue: float | None = _ask("What is the revenue of all products with the model a year, in USD?", ge=0)
    yearly_recurring_revenue: float | None = _ask("What is the product's annual recurring revenue, in USD?", ge=0)
    territories: list[str] | None = _ask("Where is it offered (ISO codes, such as US, GB; EU for all of the Union)?")
    multimodal: bool | None = _ask("Does the model take images, video or sound?")
    weakens_guardrails: bool | None = _ask("Was a safety guardrail of the base removed or weakened?")
    interface: list[str] = Field(default=[], description="texts that its users see on the user interface")
    documentation: list[str] = Field(default=[], description="texts on its website, about page or in its manual")
    terms: list[str] = Field(default=[], description="passages of the terms that its users accept")
    agreements: list[str] = Field(default=[], description="ids of licences whose licensor agreed with you in writing")
    data_acknowledged: list[str] = Field(default=[], description="data of unknown licence that you looked into")
    organisation: Organisation = Organisation()

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Product:
        if self.commercial is False and self._revenue():
            raise ValueError("`commercial = false`, but it has revenue")
        return self

    def _revenue(self) -> bool:
        return any((self.monthly_revenue, self.yearly_revenue, self.yearly_recurring_revenue))

    def fact(self, key: str, month: str | None = None) -> Any:
        """Return a fact by its key in the file, such as `product.monthly_users`; None: it is not known."""
        table, _, name = key.partition(".")
        value = getattr(self.organisation if table == "organisation" else self, name)
        if key == "product.commercial" and value is None and self._revenue():
            return True
        return (value or {}).get(month) if month is not None else value


def question(key: str, month: str | None = None) -> str:
    """Return what to ask for a fact."""
    table, _, name = key.partition(".")
    kind: type[BaseModel] = Organisation if table == "organisation" else Product
    return str(kind.model_fields[name].description).format(month=month)


class ProductFile(Facts):
    """The tables of `product.toml`."""

    product: Product = Product()
    organisation: Organisation = Organisation()


def load_product(path: Path) -> Product:
    """Read `product.toml`."""
    try:
        tables = ProductFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; docs/product.toml is one to copy") from None
    except ValidationError as error:
        raise UserError(f"{path}: {_wrong(error)}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as TOML: {error}") from None
    if "organisation" in tables.product.model_fields_set:
        raise UserError(f"{path}: unknown key product.organisation; it is a table of its own, [organisation]")
    return tables.product.model_copy(update={"organisation": tables.organisation})


def _wrong(error: ValidationError) -> str:
    first = error.errors()[0]
    *table, name = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        kinds: dict[str, type[BaseModel]] = {"product": Product, "organisation": Organisation}
        known = set((kinds[table[0]] if table else ProductFile).model_fields)
        close = nearest(name, known - {"organisation"} if table else known)
        return f"unknown {'key' if table else 'table'} {'.'.join([*table, name])}{close}"
    if first["type"] == "model_type":
        return "`product` and `organisation` must be tables, each once: [product], [organisation]"
    return f"{'.'.join([*table, name])}: {first['msg']}"


def released(product: Product | None, name: str) -> Product:
    """Return the facts of a product whose model is being released: it has a name, and others may receive the weights."""
    product = product or Product()
    if product.model_name not in {None, name}:
        raise UserError(f"the release is called {name!r}, product.model_name is {product.model_name!r}; make them one")
    return product.model_copy(update={"model_name": name, "distributed": product.distributed is not False})


Kind = Literal["ship", "notice", "changes", "display", "name", "pass on", "use", "agreement", "outputs", "read", "data"]
Outcome = Literal["fires", "not", "asks"]

DISTRIBUTED = {"fact": "product.distributed", "op": "is", "value": True}
HOSTED = {"fact": "product.hosted", "op": "is", "value": True}
# Written for copies and changes; whether a model trained on them is one, nobody knows yet.
UNSETTLED = re.compile(r"GPL|MPL|EPL|CDDL|EUPL|CC-BY-(SA|NC|ND)|proprietary", re.IGNORECASE)
UNKNOWN = "unknown"
SELF = "this model"  # the ancestor of files that came with none
GENERATED = "sampled from the base"  # how a corpus describes text that its own base wrote


@dataclass(frozen=True)
class LicenceUse:
    """A licence that something a model was made of came under."""

    ancestor: str  # the model, teacher or data
    role: Literal["weights", "teacher", "data"]
    licence: str | None  # id of the text; of data the expression that was found; None: unknown
    file: str | None = None  # the text, relative to the model's folder; None: none came with it
    notice: bool = False  # whether a NOTICE came with it
    seen: bool = True  # False: a registry lists the licence, nobody has looked at the text


class Question(NamedTuple):
    """A fact that is missing: its key in product.toml, and what to ask."""

    key: str
    text: str


@dataclass(frozen=True)
class Duty:
    """One clause of one ancestor's licence, held against the facts of a product."""

    licence: str
    ancestor: str
    kind: Kind
    text: str
    outcome: Outcome
    reason: str = ""
    words: tuple[str, ...] = ()  # to be used literally; one of them is enough
    where: str | None = None  # they have to stand
    questions: tuple[Question, ...] = ()


class Answer(NamedTuple):
    """What became of a condition."""

    outcome: Outcome
    reasons: tuple[str, ...] = ()
    questions: tuple[Question, ...] = ()


def licence_uses(folder: Path) -> list[LicenceUse]:
    """Return the licences of all that a model was made of: ancestors, teachers and data, from its folder and its lineage."""
    lineage = load_lineage(folder) if (folder / LINEAGE_FILE).is_file() else None
    teachers = _only_teachers(lineage) if lineage else set()
    files = [(each, SELF if each.inherited_from == OWN else each.inherited_from) for each in held(folder)]
    noticed = {name for each, name in files if is_notice(each.file)}
    texts = [(each, name) for each, name in files if not is_notice(each.file)]
    uses = [LicenceUse(name, _role(name, teachers), each.licence, each.file, name in noticed) for each, name in texts]
    if lineage is None:
        return uses or [LicenceUse(SELF, "weights", None)]
    return [*uses, *_silent(lineage, teachers), *_data_uses(lineage)]


def _role(name: str, teachers: set[str]) -> Literal["weights", "teacher"]:
    return "teacher" if name in teachers else "weights"


def _name(record: Record) -> str:
    return folder_name(record.origin.name if record.origin else record.stage)


def _only_teachers(lineage: Lineage) -> set[str]:
    """Return the ancestors whose weights did not go into the model: it learned from their outputs."""
    without = {folder_name(edge.name) for _, edge in edges(lineage, "teacher") if edge.record is None}
    records = {_name(each) for each in lineage.records.values()} | without
    return records - {_name(each) for each in in_order(lineage, "weights")}


def _silent(lineage: Lineage, teachers: set[str]) -> Iterator[LicenceUse]:
    """Yield the bases that came without a licence file, and the parents that carry no record, so no licence either."""
    for record in lineage.records.values():
        if record.origin and not record.licences:
            yield LicenceUse(_name(record), _role(_name(record), teachers), None)
        for edge in record.parents:
            if edge.record is None and edge.role != "compared":
                yield LicenceUse(edge.name, "weights" if edge.role == "weights" else "teacher", None)


def _data_uses(lineage: Lineage) -> list[LicenceUse]:
    """Return the licences of the data, each once."""
    read = [record for key, record in lineage.records.items() if key not in lineage.corpora]  # not all that they hold
    data = [use for record in read for use in record.data]
    named = {(use.name, licence) for use in data for licence in use.licences}
    unnamed = [use for use in data if not use.licences]
    named |= {(use.name, GENERATED if use.source.startswith(GENERATED) else UNKNOWN) for use in unnamed}
    return [LicenceUse(name, "data", None if licence == UNKNOWN else licence) for name, licence in sorted(named)]


def evaluate(
    uses: Iterable[LicenceUse], product: Product | None, facts: Iterable[dict[str, Any]] | None = None
) -> list[Duty]:
    """Return every clause of every licence with its outcome for this product; no product: all its facts are unknown."""
    known = {str(licence["id"]): licence for licence in (obligations() if facts is None else facts)}
    product = product or Product()
    duties: list[Duty] = []
    for use in uses:
        if use.role == "data":
            duties.append(_data_duty(use, product))
            continue
        duties += [] if use.seen and use.licence in known else [_to_read(use)]
        duties += _clauses(use, known[use.licence], product) if use.licence in known else []
    return duties


def _to_read(use: LicenceUse) -> Duty:
    if not use.seen:
        text = f"its text was not seen here, {use.licence} is only listed for it: compare what comes with the weights"
    elif use.file is None:
        text = "no licence came with it: find out what it allows"
    else:
        text = f"{use.file}: unknown text, read it"
    if use.role == "teacher":
        text += "; its outputs were trained on: may they be?"
    return Duty(use.licence or "unknown", use.ancestor, "read", text, "asks")


def _data_duty(use: LicenceUse, product: Product) -> Duty:
    licence = use.licence or UNKNOWN
    why = "no duty known for a model trained on it"
    duty = Duty(licence, use.ancestor, "data", f"data under {licence}", "not", why)
    if use.ancestor in product.data_acknowledged:
        return replace(duty, reason="acknowledged in product.data_acknowledged")
    if licence == GENERATED:
        return replace(duty, text="data the base wrote itself", reason="the base's own licence holds")
    if licence == UNKNOWN:
        asked = f"May {use.ancestor} be trained on? Its licence is not known. List it once you have looked into it."
    elif is_proprietary(licence):
        asked = f"May weights trained on {use.ancestor}, which is proprietary, leave its owner? List it once the owner agrees."
    elif all(UNSETTLED.search(choice) for choice in licence.split(" OR ")):
        asked = f"Is a model trained on {use.ancestor} bound by {licence}? That is not settled. List it once you have decided."
    else:
        return duty
    return replace(duty, outcome="asks", reason="", questions=(Question("product.data_acknowledged", asked),))


def _clauses(use: LicenceUse, licence: dict[str, Any], product: Product) -> Iterator[Duty]:
    """Yield the duties of a known licence."""
    given = Given(use, licence, product)
    bound = use.role == "weights" or licence.get("derivatives_include_distillation", False)
    forbidden = str(licence.get("output_training", "")).startswith("must not")
    if use.role == "teacher" and (forbidden or not bound):
        why = "the model was trained on its outputs" if forbidden else "no clause about a model trained on its outputs"
        answer = Answer("fires" if forbidden else "not", (why,))
        yield given.duty("outputs", "its outputs may not train another model", answer)
    if bound:
        yield from given.redistribution()
    for clause in [*licence.get("unconditional", []), *licence.get("conditional", [])]:
        if bound or clause.get("outputs"):
            yield given.clause(clause)
    for policy in ("aup", "use_restrictions"):
        if bound and policy in licence:
            always = Answer("fires", ("whatever it is used for",))
            yield given.duty("use", f"use it for nothing that its policy forbids ({licence[policy]})", always)


@dataclass(frozen=True)
class Given:
    """One use of one licence, and the product it is held against."""

    use: LicenceUse
    licence: dict[str, Any]
    product: Product

    def duty(self, kind: Kind, text: str, answer: Answer, words: str = "", where: str | None = None) -> Duty:
        """Return a duty of this licence; `words`: the literal texts, with | between those of which one is enough."""
        literal = tuple(words.split("|")) if words else ()
        return Duty(str(self.licence["id"]), self.use.ancestor, kind, text, answer.outcome, "; ".join(answer.reasons),
                    literal, where, answer.questions)  # fmt: skip

    @property
    def offered(self) -> Answer:
        """Whether others get at the model at all."""
        return either([self._holds(DISTRIBUTED), self._holds(HOSTED)])

    def redistribution(self) -> Iterator[Duty]:
        """Yield what must go along with copies; some licences call hosting a distribution."""
        hosting = self.licence.get("distribution_includes_hosting")
        copied = self.offered if hosting else self._holds(DISTRIBUTED)
        for name in self.licence.get("redistribution", []):
            kind, words, where, answer = licences.duty_facts(name)["kind"], "", None, copied
            if kind == "notice":
                words, where = str(self.licence.get("notice_text", "")), "NOTICE"
            elif kind == "pass on":
                words, where = str(self.licence["restrictions_called"]), "your terms"
            elif name == "NOTICE_passthrough_if_present" and not self.use.notice:
                answer = Answer("not", ("no NOTICE came with it",))
            yield self.duty(kind, duty_text(name) + (f" “{words}”" if words else ""), answer, words, where)

    def clause(self, clause: dict[str, Any]) -> Duty:
        """Return the duty of one clause; without conditions it holds for whatever others get at."""
        together = [self._holds(part) for part in clause.get("if_all", [])]
        if "if_any" in clause:
            together.append(either([self._holds(part) for part in clause["if_any"]]))
        answer = both(together) if together else self.offered
        words, where = str(clause.get("text", "")), clause.get("where")
        kind, text = licences.duty_facts(clause["duty"])["kind"], licences.clause_text(clause)
        return self.duty(kind, text, answer, words, where)

    def _holds(self, condition: dict[str, Any]) -> Answer:
        key, month = str(condition["fact"]), condition.get("month")
        value, wanted = self.product.fact(key, month), condition["value"]
        name = f"{key}.{month}" if month else key
        if value is None:
            return Answer("asks", questions=(Question(name, question(key, month)),))
        if condition["op"] == ">":
            fires, shown = value > wanted, f"{value:,.0f} ({'' if value > wanted else 'not '}> {wanted:,})"
        elif condition["op"] == "is":
            fires, shown = value is wanted, str(value).lower()
        else:
            listed = [value] if isinstance(value, str) else value
            fires, shown = bool(_places(listed) & _places(wanted)), ", ".join(listed)
        return Answer("fires" if fires else "not", (f"{name} = {shown}",))


def _places(codes: Iterable[str]) -> set[str]:
    """Return countries; the Union stands for all its members."""
    return {place for code in codes for place in ({code.upper()} if code.upper() != "EU" else UNION)}


def either(answers: list[Answer]) -> Answer:
    """Join conditions of which one is enough."""
    return _joined(answers, ("fires", "asks", "not"))


def both(answers: list[Answer]) -> Answer:
    """Join conditions that must all hold."""
    return _joined(answers, ("not", "asks", "fires"))


def _joined(answers: list[Answer], order: tuple[Outcome, ...]) -> Answer:
    """Return the decisive outcome if there is one, with what decided; else what is unknown; else all reasons."""
    outcome = next(outcome for outcome in order if any(answer.outcome == outcome for answer in answers))
    same = [answer for answer in answers if answer.outcome == outcome]
    reasons = tuple(reason for answer in same for reason in answer.reasons)
    return Answer(outcome, reasons, tuple(question for answer in same for question in answer.questions))


def notice(duties: Iterable[Duty], name: str) -> str:
    """Return the NOTICE of a release: whose work is in it, that it was changed, and the sentences licences want there."""
    fired = [duty for duty in duties if duty.outcome == "fires"]
    changes = [duty for duty in fired if duty.kind == "changes" and duty.ancestor != SELF]
    changed = {f"{duty.ancestor} ({duty.licence}) was changed to make it." for duty in changes}
    wanted = {duty.words[0] for duty in fired if duty.kind == "notice" and duty.words}
    head = f"{name} was made from the work of others. Their licences and notices lie in LICENSES as they were received."
    return "\n\n".join([head, *sorted(changed), *sorted(wanted)]) + "\n"


def unmet(duties: Iterable[Duty], product: Product, card: str | None = None, noted: str = "") -> list[str]:
    """Return the duties that fire and are not fulfilled, each in a line that says what to do.

    Checked is what can be: texts in the card, in NOTICE and in the product, the model's name, agreements. `card`: None before
    there is one. Whether licence files are there and unaltered is for `refuse_losses` and the release to check.
    """
    fixes = ((duty, _fix(duty, product, card, noted)) for duty in duties if duty.outcome == "fires")
    return [f"{duty.licence} of {duty.ancestor}: {duty.text}: {fix}" for duty, fix in fixes if fix]


def _fix(duty: Duty, product: Product, card: str | None, noted: str) -> str | None:
    on_screen = duty.where == "user_interface"
    shown = [*product.interface, *([] if on_screen else [*product.documentation, card or ""])]
    if duty.kind == "display" and not _has(duty.words, shown):
        return f"show it, and list the text in product.interface{'' if on_screen else ' or product.documentation'}"
    if duty.kind == "display" and card is not None and not _has(duty.words, [card]):
        return "the model card does not say it; make the card again"
    if duty.kind == "notice" and duty.words and not _has(duty.words, [noted]):
        return "NOTICE does not have that sentence; make it again"
    if duty.kind == "name" and not (product.model_name or "").startswith(duty.words):
        return f"it is called {product.model_name or 'nothing yet'}; set product.model_name"
    if duty.kind == "pass on" and not _has(duty.words, product.terms):
        return "put them into the terms your users accept, and list the passage in product.terms"
    if duty.kind in {"agreement", "outputs"} and duty.licence not in product.agreements:
        return f"agree with the licensor, then list {duty.licence!r} in product.agreements"
    return None


def _has(words: tuple[str, ...], texts: Iterable[str]) -> bool:
    """Return whether one of the texts says one of the words, however its lines are broken."""
    said = [" ".join(text.split()) for text in texts]
    return any(" ".join(word.split()) in text for word in words for text in said)
