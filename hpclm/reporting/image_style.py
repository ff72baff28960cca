"""The style of images, with fonts for Chinese text, and their encoding."""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hpclm.base import extras

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)
INK = "#808890"  # text and axes: legible on white and on black
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text, in the reader's font
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.15,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color"), INK
    ),
}
CHINESE = (
    *("Noto Sans CJK SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "PingFang SC"),
    *("Microsoft YaHei", "SimHei", "Noto Sans CJK JP", "Droid Sans Fallback"),
)
"""Fonts with Chinese characters, which matplotlib's own font lacks."""


@contextmanager
def styled(drawn: str, text: str = "") -> Iterator[None]:
    """Draw in this style during the block, with a font for Chinese characters in ``text``, or a warning if matplotlib knows none.
    ConfigError, which names ``drawn``, if matplotlib is not installed."""
    with extras.needed_for(drawn):
        import matplotlib

    style = STYLE
    if any(char >= "\u2e80" for char in text):
        style = STYLE | {"font.family": ["sans-serif", *_chinese_fonts()]}
    with matplotlib.rc_context(style):
        yield


def new_figure(width: float, height: float) -> tuple["Figure", "Axes"]:
    """An empty figure of this size in inches."""
    from matplotlib.figure import Figure  # without pyplot, which keeps figures and looks for a display

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def encoded(figure: "Figure", kind: str = "png", dpi: int = 200) -> bytes:
    """The figure on white, as PNG or, with text in the reader's font, as SVG."""
    content = io.BytesIO()
    metadata = {"Date": None, "Creator": None} if kind == "svg" else None
    with warnings.catch_warnings(), styled("an image"):
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from")  # ``styled`` has warned
        figure.savefig(content, format=kind, dpi=dpi, facecolor="white", metadata=metadata)
    return content.getvalue()


def _chinese_fonts() -> list[str]:
    import matplotlib
    from matplotlib.font_manager import fontManager

    fonts = [font for font in CHINESE if font in fontManager.get_font_names()][:1]
    if not fonts:
        log.warning(
            "images show Chinese characters as boxes: matplotlib knows no Chinese font; install one, such as Debian's "
            "fonts-noto-cjk, and delete %s",
            matplotlib.get_cachedir(),
        )
    return fonts
