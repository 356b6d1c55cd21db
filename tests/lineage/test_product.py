from __future__ import annotations

from pathlib import Path

import pytest

from etude.errors import UserError
from etude.lineage.duties import Organisation, Product, load_product, released

EXAMPLE = Path(__file__).resolve().parents[2] / "docs/product.toml"


def test_the_example_tells_facts_of_both_tables() -> None:
    product = load_product(EXAMPLE)
    assert (product.monthly_users, product.organisation.country) == (1200, "DE")
    assert product.fact("organisation.users_in_month", "2024-06") == 0
    assert product.fact("organisation.users_in_month", "2024-07") is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[product]\nmonthly_user = 3", "unknown key product.monthly_user; did you mean 'monthly_users'"),
        ("[product.organisation]\ncountry = 'DE'", "unknown key product.organisation"),
        ("[organisation]\ncontry = 'DE'", "unknown key organisation.contry; did you mean 'country'"),
        ("[products]\n", "unknown table products; did you mean 'product'?"),
        ("[product]\nmonthly_users = 'many'", "product.monthly_users: Input should be a valid integer"),
        ("[product]\nmonthly_users = -1", "product.monthly_users: Input should be greater than or equal to 0"),
        ("[product]\ncommercial = false\nmonthly_revenue = 1.0", "`commercial = false`, but it has revenue"),
        ("product = 3", "`product` and `organisation` must be tables"),
        ("[[product]]\nname = 'a'\nmodel_name = 'b'", "`product` and `organisation` must be tables"),
        ("[product", "cannot be read as TOML"),
    ],
)
def test_what_is_wrong_in_the_file_is_told_in_one_line(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "product.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as refused:
        load_product(path)
    assert told in str(refused.value)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match=r"docs/product\.toml is one to copy"):
        load_product(tmp_path / "absent.toml")


def test_a_release_has_its_name_and_is_given_away_unless_said_otherwise() -> None:
    assert released(None, "mine") == Product(model_name="mine", distributed=True)
    kept = released(Product(distributed=False, organisation=Organisation(country="FR")), "mine")
    assert (kept.distributed, kept.organisation.country) == (False, "FR")
    with pytest.raises(UserError, match=r"the release is called 'mine', product\.model_name is 'yours'"):
        released(Product(model_name="yours"), "mine")


def test_revenue_makes_it_commercial() -> None:
    assert Product(monthly_revenue=1).fact("product.commercial") is True
    assert Product(monthly_revenue=0.0).fact("product.commercial") is None
