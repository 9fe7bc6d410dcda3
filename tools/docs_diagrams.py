"""Renders the Mermaid sources docs/diagrams/*.mmd to docs/images/*.svg, so that the built site loads no external
script.

    npm pack mermaid@11 && tar xzf mermaid-*.tgz package/dist/mermaid.min.js
    python tools/docs_diagrams.py package/dist/mermaid.min.js

Needs Chromium. Each SVG begins with the hash of its source; ``--check`` (which needs neither) fails where they differ.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES, IMAGES = ROOT / "docs/diagrams", ROOT / "docs/images"
SETTINGS = {
    "startOnLoad": False,
    "theme": "neutral",
    "htmlLabels": False,
    "flowchart": {"htmlLabels": False, "useMaxWidth": False},
    "sequence": {"useMaxWidth": False},
    "fontFamily": "Helvetica, Arial, sans-serif",
    "deterministicIds": True,
}
PAGE = """<!doctype html><meta charset="utf-8"><body><script src="{script}"></script><script>
const sources = {sources};
mermaid.initialize({settings});
(async () => {{
  for (const [name, source] of Object.entries(sources)) {{
    const made = await mermaid.render("d-" + name, source);
    const box = document.createElement("div");
    box.id = "box-" + name;
    box.innerHTML = made.svg;
    document.body.append(box);
    const text = document.createElement("pre");
    text.id = "out-" + name;
    text.textContent = new XMLSerializer().serializeToString(box.firstElementChild);
    document.body.append(text);
  }}
  document.body.append(Object.assign(document.createElement("p"), {{ id: "done" }}));
}})();
</script></body>"""


def stamp(source: str) -> str:
    """The first line of the SVG of a source."""
    return f"<!-- source sha256 {hashlib.sha256(source.encode()).hexdigest()[:16]} -->\n"


def stale() -> list[str]:
    """Names of sources whose SVG is missing or was rendered from another text."""
    found = []
    for path in sorted(SOURCES.glob("*.mmd")):
        image = IMAGES / f"{path.stem}.svg"
        if not image.exists() or not image.read_text().startswith(stamp(path.read_text())):
            found.append(path.stem)
    return found


def render(script: Path, chromium: str) -> None:
    """Writes all SVGs."""
    sources = {path.stem: path.read_text() for path in sorted(SOURCES.glob("*.mmd"))}
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(
            PAGE.format(script=script.resolve().as_uri(), sources=json.dumps(sources), settings=json.dumps(SETTINGS))
        )
        command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=30000", "--dump-dom"]
        made = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, check=True, timeout=120).stdout
    found = dict(re.findall(r'<pre id="out-([\w-]+)">(.*?)</pre>', made, flags=re.DOTALL))
    if missing := set(sources) - set(found):
        raise SystemExit(f"not rendered: {', '.join(sorted(missing))}; the first error of Mermaid stops the rest")
    IMAGES.mkdir(exist_ok=True)
    for name, text in found.items():
        picture = html.unescape(text).replace("<svg ", '<svg style="background: white" ', 1)
        picture = re.sub(r'(<svg [^>]*?) style="(?!background)[^"]*"', r"\1", picture, count=1)
        (IMAGES / f"{name}.svg").write_text(stamp(sources[name]) + picture + "\n")


def main() -> int:
    """Render, or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path, nargs="?", help="mermaid.min.js")
    parser.add_argument("--chromium", default="chromium")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if not options.check:
        if options.script is None:
            parser.error("name mermaid.min.js")
        render(options.script, options.chromium)
    if found := stale():
        print(f"stale: {', '.join(found)}; run python tools/docs_diagrams.py mermaid.min.js")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
