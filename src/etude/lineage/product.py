"""What a product is like, as far as licences ask: `product.toml`.

Every fact may be left out. A clause that needs one which is not there asks for it; the description of each fact is the question.
Who, what for and when are asked by no clause: the model card and the EU forms print them.
"""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from etude.errors import UserError, nearest

if TYPE_CHECKING:
    from pathlib import Path

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)
UNION = {"AT", "BE", "BG", "CY", "CZ", "DE", "DK", "EE", "ES", "FI", "FR", "GR", "HR", "HU", "IE", "IT", "LT", "LU", "LV", "MT",
         "NL", "PL", "PT", "RO", "SE", "SI", "SK"}  # the EU  # fmt: skip


def _ask(question: str, **bounds: Any) -> Any:
    return Field(default=None, description=question, **bounds)


class Organisation(BaseModel):
    """Who offers the product, with all its affiliates."""

    model_config = STRICT

    name: str | None = _ask("Who provides the model?")
    contact: str | None = _ask("How is the provider reached?")
    country: str | None = _ask("In which country is your principal place of business (ISO code, such as DE)?")
    monthly_revenue: float | None = _ask("What is the group's revenue a month, of everything, in USD?", ge=0)
    yearly_revenue: float | None = _ask("What was the group's highest revenue in 12 months, in USD?", ge=0)
    model_service: bool | None = _ask(
        "Do you, or affiliates, sell access to models (inference, fine-tuning) as a service?"
    )
    model_service_or_work_assistant: bool | None = _ask(
        "Do you, or affiliates, offer models as a service, or an AI assistant for work such as coding or office?"
    )
    users_in_month: dict[str, int] | None = _ask(
        "How many monthly active users had all products of you and your affiliates in {month}?"
    )


class Product(BaseModel):
    """The product a model goes into; in the file, all but `organisation` stands in the table `product`."""

    model_config = STRICT

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
    weakens_guardrails: bool | None = _ask(
        "Was a safety guardrail of the base removed or weakened, by training or else?"
    )
    interface: list[str] = Field(default=[], description="texts that its users see on the user interface")
    documentation: list[str] = Field(default=[], description="texts on its website, about page or in its manual")
    terms: list[str] = Field(default=[], description="passages of the terms that its users accept")
    agreements: list[str] = Field(default=[], description="ids of licences whose licensor agreed with you in writing")
    data_acknowledged: list[str] = Field(
        default=[], description="data you looked into although their licence is unknown"
    )
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


def load_product(path: Path) -> Product:
    """Read `product.toml`."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; docs/product.toml is one to copy") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as TOML: {error}") from None
    if wrong := [name for name in found if name not in {"product", "organisation"}]:
        raise UserError(f"{path}: unknown table {wrong[0]!r}{nearest(wrong[0], ['product', 'organisation'])}")
    tables = {name: found.get(name, {}) for name in ("product", "organisation")}
    if not all(isinstance(table, dict) for table in tables.values()):
        raise UserError(f"{path}: `product` and `organisation` must be tables, each once: [product], [organisation]")
    if "organisation" in tables["product"]:
        raise UserError(f"{path}: unknown key product.organisation; it is a table of its own, [organisation]")
    try:
        return Product.model_validate({**tables["product"], "organisation": tables["organisation"]})
    except ValidationError as error:
        raise UserError(f"{path}: {_first(error)}") from None


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    at = [str(part) for part in first["loc"]]
    key = ".".join(at if at[:1] == ["organisation"] else ["product", *at])
    if first["type"] == "extra_forbidden":
        fields = Organisation.model_fields if at[0] == "organisation" else Product.model_fields
        return f"unknown key {key}{nearest(at[-1], set(fields) - {'organisation'})}"
    return f"{key}: {first['msg']}"


def released(product: Product | None, name: str) -> Product:
    """Return the facts of a product whose model is being released: it has a name, and others may receive the weights."""
    product = product or Product()
    if product.model_name not in {None, name}:
        raise UserError(
            f"the release is called {name!r}, but product.model_name is {product.model_name!r}; make them one"
        )
    return product.model_copy(update={"model_name": name, "distributed": product.distributed is not False})
