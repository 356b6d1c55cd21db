"""What the page can change while a run goes on: the weights of its reward, and whether it goes on; each as from the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from etude.web.app import Action
    from etude.web.reading import Shelf


def actions_on(shelf: Shelf) -> dict[str, Action]:
    return {}
