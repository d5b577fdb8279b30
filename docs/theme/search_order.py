"""Order the results of the search: guides first; the gallery, the internals and the changelog last."""

from __future__ import annotations

from typing import Any

BOOSTS = {"Get started": 2, "Guides": 2, "Gallery": 0.5, "Internals": 0.5, "Changelog": 0.5}
"""The factor of the score of a page, by its title in the navigation or by that of the nearest section."""


def on_page_markdown(_: str, page: Any, **__: Any) -> None:
    """Set the factor of a page, as its front matter would."""
    titles = [each.title for each in (page, *page.ancestors) if each.title in BOOSTS]
    if titles:
        page.meta["search"] = {"boost": BOOSTS[titles[0]]}
