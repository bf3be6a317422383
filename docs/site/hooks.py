"""Hooks of the documentation site: pages that are made, and links that lead out of docs/.

Pages stay where they are on disk, with links that work in a checkout. In the site, `../README.md` is the first page,
and a file of `examples/` or `benchmarks/` is a page with its source.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

SITE = Path(__file__).parent
ROOT = SITE.parents[1]
sys.path.insert(0, str(SITE))

import decisions  # noqa: E402
import reference  # noqa: E402

log = logging.getLogger("mkdocs.plugins.penstock")

LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
PICTURE = re.compile(r"!\[([^\]]*)\]\(pictures/([\w-]+)\.svg\)")
RENAMED = {
    "README.md": "index.md",
    "docs/README.md": "contents.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
    "benchmarks/README.md": "benchmarks/commands.md",
}
"""Pages of the site that are files elsewhere in the repository."""
LANGUAGES = {".py": "python", ".json": "json", ".yaml": "yaml", ".toml": "toml", ".sh": "bash", ".sbatch": "bash"}
GALLERY = Path(os.environ.get("PENSTOCK_GALLERY", ROOT / "build" / "gallery"))
"""What docs/site/gallery.py has made; tests name another folder."""


def on_config(config: Any) -> Any:
    """The configuration with slugs as in a checkout's viewer, and the navigation of the pages that are made."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    for section in config.nav:
        for title, pages in section.items():
            if title == "Reference":
                pages.extend(f"reference/{name}.md" for name in reference.packages())
            elif title == "Decisions":
                pages.extend(f"decisions/{path.name}" for path in decisions.files(ROOT))
            elif title == "Start" and not (GALLERY / "gallery.md").exists():
                pages.remove("gallery.md")
                log.info("no gallery: docs/site/gallery.py has not been run, or found nothing to show")
    return config


def on_files(files: Files, config: Any) -> Files:
    """The files of docs/ and those that are made."""
    contents = files.get_file_from_path("README.md")
    assert contents is not None
    files.remove(contents)
    pages = {target: (ROOT / source).read_text(encoding="utf-8") for source, target in RENAMED.items()}
    pages["decisions/index.md"] = decisions.page(ROOT)
    pages |= {f"reference/{name}.md": text for name, text in reference.pages().items()}
    for source in sorted(linked_sources()):
        pages[page_of(source)] = source_page(source)
    for uri, content in pages.items():
        files.append(File.generated(config, uri, content=content))
    if (GALLERY / "gallery.md").exists():
        for path in sorted(GALLERY.iterdir()):
            uri = path.name if path.suffix == ".md" else f"gallery/{path.name}"
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """A page with the marks of the tests removed from its blocks, and its links as those of the site."""
    markdown = re.sub(r"^```(\w+) (?:no-run|file=\S+)$", r"```\1", markdown, flags=re.MULTILINE)
    markdown = PICTURE.sub(
        lambda match: f'<div class="picture-frame"><!--picture {match[2]}|{escape(match[1])}--></div>', markdown
    )
    return LINK.sub(lambda match: match[1] + site_link(page.file.src_uri, match[2]) + match[3], markdown)


def on_page_content(html: str, page: Page, config: Any, files: Files) -> str:
    """A page with its pictures inside, where their colours follow the switch of the site."""

    def inside(match: re.Match[str]) -> str:
        svg = (ROOT / "docs" / "pictures" / f"{match[1]}.svg").read_text(encoding="utf-8")
        return svg.replace("<svg ", f'<svg aria-label="{match[2]}" ', 1)

    return re.sub(r"<!--picture ([\w-]+)\|(.*?)-->", inside, html)


def on_post_page(output: str, page: Page, config: Any) -> str:
    """A page whose search has a name, for those who hear it."""
    return output.replace('data-md-component="search" role="dialog"', 'data-md-component="search" role="search"', 1)


def site_link(page: str, target: str) -> str:
    """The link of a page of the site for a link of its file in the repository."""
    origin = {made: source for source, made in RENAMED.items()}.get(page, f"docs/{page}")
    there = (ROOT / origin).parent.joinpath(target).resolve()
    if not there.is_relative_to(ROOT) or not there.exists():
        return target  # mkdocs reports it
    path = there.relative_to(ROOT).as_posix()
    if path in RENAMED:
        made = RENAMED[path]
    elif path.startswith("docs/") and not path.startswith("docs/site/"):
        made = path.removeprefix("docs/")
        made = f"{made}/index.md" if there.is_dir() else made
    else:
        made = page_of(path)
    return "../" * page.count("/") + made


def page_of(source: str) -> str:
    """The page of a file or folder outside of docs/, such as examples/mixing.py.md."""
    made = f"{source}/index.md" if (ROOT / source).is_dir() else f"{source}.md"
    return made if source.split("/")[0] in ("examples", "benchmarks") else f"project/{made}"


def linked_sources() -> set[str]:
    """Files and folders outside of the pages that pages link to."""
    found: set[str] = set()
    pages = [(page, page.parent) for page in [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in RENAMED)]]
    if (GALLERY / "gallery.md").exists():
        pages.append((GALLERY / "gallery.md", ROOT / "docs"))
    for page, folder in pages:
        for _, target, _ in LINK.findall(page.read_text(encoding="utf-8")):
            there = folder.joinpath(target).resolve()
            if there.exists() and there.is_relative_to(ROOT):
                path = there.relative_to(ROOT).as_posix()
                if path.startswith("docs/site/") or not (path + "/").startswith("docs/"):
                    found.add(path)
    return found - set(RENAMED) - {"."}


def source_page(source: str) -> str:
    """A page that shows a file, or lists a folder."""
    path = ROOT / source
    if path.is_dir():
        names = sorted(each.name + "/" * each.is_dir() for each in path.iterdir() if each.name[0] not in "._")
        return f"# {source}/\n\nA folder of the checkout:\n\n" + "".join(f"- `{name}`\n" for name in names)
    fence = "`" * 4
    language = LANGUAGES.get(path.suffix, "text")
    return f"# {source}\n\n{fence}{language}\n{path.read_text(encoding='utf-8')}{fence}\n"


def slug(title: str, separator: str = "-") -> str:
    """The anchor of a heading, as viewers of checkouts make it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", separator)
