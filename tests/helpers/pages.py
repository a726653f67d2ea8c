"""The page of a report of families made by hand."""

from collections.abc import Mapping

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.report.families import Family
from resnet8ptq.report.pages import page, trade_off
from resnet8ptq.report.selection import select


def to_page(
    family: Family, limits: ReportConfig | None = None, figures: Mapping[str, bytes] | None = None
) -> str:
    """Return the page of one family of runs."""
    chosen = select([family], limits or ReportConfig())
    return page.to_html(chosen, [trade_off.panels(s) for s in chosen], figures or {})
