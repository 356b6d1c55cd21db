from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.lineage.duties import (
    Answer,
    Duty,
    LicenceUse,
    Organisation,
    Product,
    both,
    either,
    evaluate,
    licence_uses,
    notice,
    unmet,
)
from etude.lineage.licences import identify, letters_hash, obligations, plain
from etude.lineage.record import Lineage, Parent
from tests.lineage.licence_texts import KIMI, MINIMAX, MIT
from tests.lineage.records import child_of, full_record, three_generations

OFFERED = Product(distributed=True)


def duties_of(licence: str | None, product: Product | None = None, role: Any = "weights") -> list[Duty]:
    return evaluate([LicenceUse("base", role, licence, "LICENSE")], product)


def only(duties: list[Duty], kind: str) -> Duty:
    (found,) = [duty for duty in duties if duty.kind == kind]
    return found


def kinds(duties: list[Duty], outcome: str) -> set[str]:
    return {duty.kind for duty in duties if duty.outcome == outcome}


@pytest.mark.parametrize(
    ("product", "outcome", "asked"),
    [
        (Product(monthly_revenue=30e6), "fires", []),
        (Product(monthly_revenue=20e6, monthly_users=100_000_000), "not", []),
        (Product(monthly_revenue=20e6), "asks", ["product.monthly_users"]),
        (Product(monthly_users=100_000_001), "asks", ["product.commercial"]),
        (Product(commercial=False, monthly_users=100_000_001), "not", []),
        (None, "asks", ["product.commercial", "product.monthly_users", "product.monthly_revenue"]),
    ],
)
def test_a_product_on_kimi_k2_5_displays_its_name_above_either_threshold(
    product: Product | None, outcome: str, asked: list[str]
) -> None:
    duty = only(duties_of(identify(KIMI), product), "display")
    assert (duty.words, duty.where, duty.outcome) == (("Kimi K2.5",), "user_interface", outcome)
    assert [question.key for question in duty.questions] == asked


def test_the_mit_of_minimax_m2_is_not_mit() -> None:
    assert MINIMAX.startswith("MIT License")
    assert identify(MINIMAX) == "MiniMax-M2"
    duty = only(duties_of(identify(MINIMAX), Product(yearly_recurring_revenue=31e6)), "display")
    assert (duty.words, duty.outcome) == (("MiniMax M2",), "fires")
    assert identify(MINIMAX.replace("30 million", "40 million")) is None


def registered(folder: Path, licence: str, text: str) -> list[dict[str, Any]]:
    """The known facts, from a file of their own, where `text` stands for a licence whose words we may not copy here."""
    facts = copy.deepcopy(obligations())
    next(each for each in facts if each["id"] == licence)["text_sha256_letters"] = [letters_hash(plain(text))]
    (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    return list(json.loads((folder / "facts.json").read_text(encoding="utf-8")))


def test_a_derivative_of_llama_3_1_begins_its_name_with_llama(tmp_path: Path) -> None:
    facts = registered(tmp_path, "Llama-3.1-Community", "stands for Llama 3.1")
    licence = identify("Stands for LLAMA 3.1.", facts)
    assert identify("stands for Llama 3.2", facts) is None
    duties = evaluate([LicenceUse("llama", "weights", licence, "LICENSE")], OFFERED, facts)
    duty = only(duties, "name")
    assert (duty.words, duty.outcome) == (("Llama",), "fires")
    shown = ["Built with Llama"]
    for name, met in {"Llama-mine": True, "Mine-Llama": False, None: False}.items():
        product = Product(model_name=name, documentation=shown)
        assert (not [line for line in unmet(duties, product, None, notice(duties, "x")) if "name" in line]) == met
    gate = only(duties, "agreement")
    assert [question.key for question in gate.questions] == ["organisation.users_in_month.2024-06"]
    users = Organisation(users_in_month={"2024-06": 700_000_001, "2024-07": 0})
    assert only(duties_of(licence, Product(organisation=users)), "agreement").outcome == "fires"


def test_deepseek_v3_of_december_2024_passes_its_restrictions_on_even_when_hosted(tmp_path: Path) -> None:
    licence = identify("stands for it", registered(tmp_path, "DeepSeek-LA-1.0", "stands for it"))
    duties = duties_of(licence, Product(hosted=True, distributed=False))
    assert kinds(duties, "fires") == {"ship", "changes", "pass on", "use"}
    assert "pass on" not in kinds(duties_of(licence, Product(hosted=False, distributed=False)), "fires")
    assert any("Attachment A" in line for line in unmet(duties, Product(terms=["be nice"])))
    assert unmet(duties, Product(terms=["the restrictions of\n  Attachment A hold for you"])) == []
    assert kinds(duties_of("MIT", Product(hosted=True, distributed=False)), "fires") == set()


def test_an_unknown_text_is_to_be_read_and_one_not_seen_to_be_compared() -> None:
    assert [(duty.kind, duty.text, duty.outcome) for duty in duties_of(None, OFFERED)] == [
        ("read", "LICENSE: unknown text, read it", "asks")
    ]
    listed = evaluate(
        [LicenceUse("kimi", "weights", "Kimi-K2.5-Modified-MIT", seen=False)], Product(monthly_revenue=3e7)
    )
    assert "only listed" in only(listed, "read").text
    assert only(listed, "display").outcome == "fires"


@pytest.mark.parametrize(
    ("licence", "fires"),
    [
        ("Llama-2-Community", {"outputs"}),
        ("Tongyi-Qianwen-2023", {"outputs"}),
        ("Llama-3.1-Community", {"name"}),
        ("Qwen-2024", {"display"}),
        ("DeepSeek-LA-1.0", {"ship", "changes", "pass on", "use"}),
        ("Kimi-K2.5-Modified-MIT", set()),
        ("MIT", set()),
    ],
)
def test_of_a_teacher_only_clauses_about_outputs_hold(licence: str, fires: set[str]) -> None:
    rich = OFFERED.model_copy(update={"monthly_revenue": 1e9, "commercial": True})
    duties = duties_of(licence, rich, role="teacher")
    assert kinds(duties, "fires") == fires
    assert duties, "what does not hold is said, too"
    if fires == {"outputs"}:
        assert "agreements" in unmet(duties, rich)[0]
        assert unmet(duties, rich.model_copy(update={"agreements": [licence]})) == []


@pytest.mark.parametrize(
    ("licence", "product", "outcome"),
    [
        ("Tencent-Hunyuan-A13B", Product(territories=["US", "FR"]), "fires"),
        ("Tencent-Hunyuan-A13B", Product(territories=["EU"]), "fires"),
        ("Tencent-Hunyuan-A13B", Product(territories=["US", "CH"]), "not"),
        ("Llama-4-Community", Product(multimodal=True, organisation=Organisation(country="de")), "fires"),
        ("Llama-4-Community", Product(multimodal=True, organisation=Organisation(country="GB")), "not"),
        ("Llama-4-Community", Product(multimodal=False), "not"),
        ("Llama-4-Community", Product(multimodal=True), "asks"),
    ],
)
def test_territories(licence: str, product: Product, outcome: str) -> None:
    (duty,) = [duty for duty in duties_of(licence, product) if duty.text.startswith("no rights")]
    assert duty.outcome == outcome


EXTREMES: dict[str, tuple[Any, Any]] = {
    "commercial": (False, True), "distributed": (False, True), "hosted": (False, True), "multimodal": (False, True),
    "weakens_guardrails": (False, True), "territories": (["US"], ["DE", "GB", "KR"]), "monthly_users": (0, 10**12),
    "monthly_revenue": (0.0, 1e12), "yearly_revenue": (0.0, 1e12), "yearly_recurring_revenue": (0.0, 1e12),
}  # fmt: skip
OF_THE_ORGANISATION: dict[str, tuple[Any, Any]] = {
    "country": ("US", "DE"), "monthly_revenue": (0.0, 1e12), "yearly_revenue": (0.0, 1e12), "model_service": (False, True),
    "model_service_or_work_assistant": (False, True),
}  # fmt: skip


def built(facts: dict[str, Any]) -> Product:
    """A product of facts by key that do not contradict each other: what has revenue is commercial."""
    if any(value for key, value in facts.items() if key.startswith("product.") and key.endswith("revenue")):
        facts = {**facts, "product.commercial": True}
    plain = {key.partition(".")[2]: value for key, value in facts.items() if key.startswith("product.")}
    group = {key.partition(".")[2]: value for key, value in facts.items() if key.startswith("organisation.")}
    months = {key.rpartition(".")[2]: value for key, value in group.items() if key.startswith("users_in_month.")}
    group = {key: value for key, value in group.items() if not key.startswith("users_in_month.")}
    return Product(**plain, organisation=Organisation(**group, users_in_month=months))


def filled(known: dict[str, Any], others: dict[str, Any]) -> Product:
    """A product of known facts and others; what is known not to be commercial has no revenue."""
    free = built(known).commercial is False
    others = {
        key: 0.0 if free and key.startswith("product.") and key.endswith("revenue") else value
        for key, value in others.items()
    }
    return built({**others, **known})


def extremes(key: str) -> tuple[Any, Any]:
    table, _, name = key.partition(".")
    if name.startswith("users_in_month"):
        return (0, 10**12)
    return (EXTREMES if table == "product" else OF_THE_ORGANISATION)[name]


@settings(max_examples=60)
@given(st.data())
def test_what_is_asked_decides_and_what_is_not_asked_does_not(data: st.DataObject) -> None:
    """Of any licence and any partial facts: answering what a clause asks, all low or all high, settles it either way."""
    licence = data.draw(st.sampled_from(obligations()))["id"]
    keys = [f"product.{name}" for name in EXTREMES] + [f"organisation.{name}" for name in OF_THE_ORGANISATION]
    known = {key: data.draw(st.sampled_from(extremes(key))) for key in data.draw(st.sets(st.sampled_from(keys)))}
    low, high = {key: extremes(key)[0] for key in keys}, {key: extremes(key)[1] for key in keys}
    duties = duties_of(licence, built(known))
    for at, duty in enumerate(duties):
        if duty.outcome != "asks":
            for others in (low, high):
                assert duties_of(licence, filled(known, others))[at].outcome == duty.outcome
        elif duty.questions:
            asked = [question.key for question in duty.questions]
            answers = [{key: extremes(key)[which] for key in asked} for which in (0, 1)]
            settled = [duties_of(licence, built({**known, **answer}))[at].outcome for answer in answers]
            assert settled == ["not", "fires"]


@given(st.lists(st.lists(st.sampled_from(["fires", "not", "asks"]), min_size=1, max_size=3), min_size=1, max_size=3))
def test_three_valued_logic_is_what_all_answers_agree_on(groups: list[list[str]]) -> None:
    def plain(unknown: dict[tuple[int, int], bool]) -> bool:
        return all(
            any(unknown.get((row, column), value == "fires") for column, value in enumerate(group))
            for row, group in enumerate(groups)
        )

    open_ones = [
        (row, column) for row, group in enumerate(groups) for column, value in enumerate(group) if value == "asks"
    ]
    completions = [
        dict(zip(open_ones, (bool(bits >> at & 1) for at in range(len(open_ones))), strict=True))
        for bits in range(2 ** len(open_ones))
    ]
    found = {plain(completion) for completion in completions}
    expected = "asks" if len(found) == 2 else "fires" if True in found else "not"
    joined = both([either([Answer(value) for value in group]) for group in groups])  # type: ignore[arg-type]
    assert joined.outcome == expected


def test_every_condition_names_a_fact_that_can_be_told() -> None:
    for licence in obligations():
        for clause in licence.get("conditional", []):
            for part in [*clause.get("if_any", []), *clause.get("if_all", [])]:
                assert extremes(f"{part['fact']}.{part['month']}" if "month" in part else part["fact"])
                assert part["op"] in {">", "is", "in"}
                assert ("month" in part) == (part["fact"] == "organisation.users_in_month")


def test_duties_are_the_union_over_ancestors() -> None:
    uses = [
        LicenceUse("a", "weights", "MIT"),
        LicenceUse("b", "weights", "Qwen-2024"),
        LicenceUse("c", "teacher", None),
    ]
    assert evaluate(uses, OFFERED) == [duty for use in uses for duty in evaluate([use], OFFERED)]


def test_the_uses_of_a_model_are_its_ancestors_teachers_and_data(tmp_path: Path) -> None:
    lineage, _ = three_generations()
    lineage.save(tmp_path)
    for name, text in {"tiny/LICENSE": KIMI, "tiny/NOTICE": "by us", "tiny/USE_POLICY.md": "be good"}.items():
        (tmp_path / "LICENSES" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "LICENSES" / name).write_text(text, encoding="utf-8")
    (tmp_path / "LICENSE").write_text(MIT.format(owner="2026 We"), encoding="utf-8")
    assert licence_uses(tmp_path) == [
        LicenceUse("this model", "weights", "MIT", "LICENSE"),
        LicenceUse("tiny", "weights", "Kimi-K2.5-Modified-MIT", "LICENSES/tiny/LICENSE", notice=True),
        LicenceUse("tiny", "weights", None, "LICENSES/tiny/USE_POLICY.md", notice=True),
        LicenceUse("teacher-9b", "teacher", None),
        LicenceUse("code", "data", "MIT"),
    ]


def test_a_teacher_with_a_record_is_a_teacher_and_a_base_without_a_licence_is_named(tmp_path: Path) -> None:
    assert full_record().origin is not None
    other = full_record().origin.model_copy(update={"name": "big"})  # type: ignore[union-attr]
    teacher = child_of(None, "teacher").model_copy(update={"origin": other, "licences": []})
    base = child_of(None, "base")
    edge = Parent(name="big", role="teacher", record=teacher.id, model_digest=teacher.model_digest)
    child = child_of(base, "sft", edge)
    Lineage.of(child, [Lineage.of(base, []), Lineage.of(teacher, [])]).save(tmp_path)
    assert LicenceUse("big", "teacher", None) in licence_uses(tmp_path)
    (tmp_path / "LICENSES/big").mkdir(parents=True)
    (tmp_path / "LICENSES/big/LICENSE").write_text(KIMI, encoding="utf-8")
    assert licence_uses(tmp_path)[0] == LicenceUse("big", "teacher", "Kimi-K2.5-Modified-MIT", "LICENSES/big/LICENSE")


def test_a_folder_without_anything_is_unknown(tmp_path: Path) -> None:
    assert licence_uses(tmp_path) == [LicenceUse("this model", "weights", None)]


@pytest.mark.parametrize(
    ("licence", "outcome"),
    [("MIT", "not"), (None, "asks"), ("GPL-3.0-only", "asks"), ("MIT OR GPL-3.0-only", "not"),
     ("GPL-2.0-only OR AGPL-3.0-only", "asks"), ("CC-BY-NC-4.0", "asks"), ("sampled from the base", "not")],
)  # fmt: skip
def test_data_is_asked_about_where_nobody_knows(licence: str | None, outcome: str) -> None:
    use = LicenceUse("web", "data", licence)
    assert [duty.outcome for duty in evaluate([use], None)] == [outcome]
    assert [duty.outcome for duty in evaluate([use], Product(data_acknowledged=["web"]))] == ["not"]


def test_texts_are_looked_for_where_they_must_stand() -> None:
    rich = Product(monthly_revenue=30e6, distributed=False)
    duties = duties_of("Kimi-K2.5-Modified-MIT", rich)
    with_it = rich.model_copy(update={"interface": ["made with\nKimi  K2.5"]})
    assert ["product.interface" in line for line in unmet(duties, rich)] == [True]
    assert [
        "product.interface" in line for line in unmet(duties, rich.model_copy(update={"documentation": ["Kimi K2.5"]}))
    ] == [True]
    assert unmet(duties, with_it) == []
    assert ["card" in line for line in unmet(duties, with_it, card="a model")] == [True]
    assert unmet(duties, with_it, card="made with Kimi K2.5") == []
    qwen = duties_of("Qwen-2024", OFFERED)
    noted = notice(qwen, "mine")
    assert "Qwen is licensed under the Qwen LICENSE AGREEMENT" in noted
    assert "base (Qwen-2024) was changed" in noted
    assert unmet(qwen, OFFERED, card="Improved using Qwen", noted=noted) == []
    assert len(unmet(qwen, OFFERED, card="a model", noted="")) == 2
