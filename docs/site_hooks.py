"""Hooks of mkdocs: the navigation of the site, and pages for files outside docs/.

Pages in docs/ link to files by their path in the repository (`../rlx/config.py`). In the site an
experiment's README is a page, a directory is a list, and any other file is a page with its text.
The reference of the config is made from rlx/config.py.
"""

import re
import sys
from pathlib import Path, PurePosixPath

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]
import config_page  # noqa: E402

NAV: dict[str, list[str]] = {
    "Start": [
        "index.md",
        "running.md",
        "runs.md",
        "notebooks.md",
        "coming_from.md",
        "from_areal.md",
    ],
    "Concepts": ["concepts.md", "staleness.md", "bias.md", "mismatch.md"],
    "Train": ["extend.md", "models.md", "gguf.md", "torch.md", "images.md", "tinker.md"],
    "Algorithms": ["algorithms.md", "results.md"],
    "Agents and tools": ["agents.md", "tools.md", "environments.md", "online.md", "debugging.md"],
    "Scale and clusters": ["scale.md", "planning.md", "cluster.md", "fleet.md"],
    "Operate": ["metrics.md", "troubleshooting.md", "reliability.md", "security.md"],
    "Reference": ["config.md", "api.md", "inside.md", "contributing.md", "changelog.md"],
}
OF_ROOT = {"AGENTS.md": "inside.md", "CONTRIBUTING.md": "contributing.md",
           "CHANGELOG.md": "changelog.md"}  # fmt: skip
TITLES = {"config.md": "Every key of the config", "inside.md": "Rooms and rules"}
WIDE = {"coming_from.md", "from_areal.md"}  # wide tables replace the table of contents
IMAGES = {".png", ".svg", ".jpg"}
LANGUAGES = {".py": "python", ".sh": "bash", ".json": "json", ".toml": "toml", ".yaml": "yaml"}
LONGEST = 40_000  # characters of a file that is shown
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
MATH = re.compile(r"\$`([^`]+)`\$")
SYMBOLS = {
    "pi": "π", "theta": "θ", "beta": "β", "sigma": "σ", "Delta": "Δ", "dots": " … ", "mid": " | ",
    "|": "‖", ",": " ", "log": "log ", "max": "max",
}  # fmt: skip


def experiments() -> list[Path]:
    """Return the README of every experiment, sorted by name."""
    return sorted((ROOT / "experiments").glob("20*/README.md"))


def site_path(repo: PurePosixPath) -> str:
    """Return the URL in the site of a repository path."""
    if str(repo) in OF_ROOT:
        return OF_ROOT[str(repo)]
    if repo.parts[:1] == ("docs",) and repo.suffix != ".py":
        return str(repo.relative_to("docs"))
    if (ROOT / repo).is_dir():
        return f"source/{repo}/index.md"
    shown = repo.suffix in IMAGES or (repo.name == "README.md" and repo.parts[0] == "experiments")
    return str(repo) if shown else f"source/{repo}.md"


def repo_path(page: str, link: str) -> PurePosixPath:
    """Return the repository file that a page links to."""
    outside = page.startswith("experiments/") or page in OF_ROOT.values()
    here = ROOT / page if outside else ROOT / "docs" / page
    return PurePosixPath((here.parent / link).resolve().relative_to(ROOT))


def source_page(path: Path) -> str:
    """Return a page with the text of a file, or with the names in a directory."""
    if path.is_dir():
        names = sorted(p.name + "/" * p.is_dir() for p in path.iterdir() if p.name[0] not in "._")
        return f"# {path.relative_to(ROOT)}/\n\n" + "\n".join(f"- `{name}`" for name in names)
    language = LANGUAGES.get(path.suffix, "text")
    text = path.read_text()
    if len(text) > LONGEST:
        text = text[:LONGEST] + "\n… and more, in the repository"
    return f"# {path.relative_to(ROOT)}\n\n``````{language}\n{text}\n``````\n"


def prose(markdown: str) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^( *)(`{3,}).*?^\1\2", "", markdown, flags=re.MULTILINE | re.DOTALL)


def on_config(config):
    """Set the navigation to NAV and the experiments; refuse other files in docs/."""
    there = {p.name for p in (ROOT / "docs").glob("*.md")} | {"config.md"}
    there |= {page for name, page in OF_ROOT.items() if (ROOT / name).exists()}
    named = [page for pages in NAV.values() for page in pages]
    other = sorted(page for page in there - {*named} if not page.endswith(".template.md"))
    config.nav = [
        {part: [{TITLES[p]: p} if p in TITLES else p for p in pages if p in there]}
        for part, pages in NAV.items()
    ]
    config.nav[list(NAV).index("Train")]["Train"] += other
    results = [{p.parent.name[8:].replace("-", " "): f"experiments/{p.parent.name}/README.md"}
               for p in experiments()]  # fmt: skip
    config.nav[list(NAV).index("Reference")]["Reference"].append({"Experiments": results})
    return config


def on_files(files, config):
    """Add pages for linked files outside docs/."""
    files.append(File.generated(config, "config.md", content=config_page.page()))
    beside = {page: ROOT / name for name, page in OF_ROOT.items() if (ROOT / name).exists()}
    for name, path in {
        **beside,
        **{site_path(p.relative_to(ROOT)): p for p in experiments()},
    }.items():
        files.append(File.generated(config, name, abs_src_path=str(path)))
    for page in [f for f in files.documentation_pages() if not f.inclusion.is_excluded()]:
        for _, link, _ in LINK.findall(prose(page.content_string)):
            if re.match(r"\w+:", link):
                continue
            repo = repo_path(page.src_uri, link)
            if not (ROOT / repo).exists() and repo.name != "config.md":
                raise PluginError(f"{page.src_uri} links to {link}, which the repository has not")
            place = site_path(repo)
            if files.get_file_from_path(place) is None:
                made = {"abs_src_path": str(ROOT / repo)} if repo.suffix in IMAGES else {}
                made = made or {"content": source_page(ROOT / repo)}
                files.append(File.generated(config, place, **made))
    return files


def on_page_markdown(markdown, page, config, files):
    """Rewrite links to the site's pages, and formulas to HTML."""
    uri = page.file.src_uri
    if uri.startswith("source/"):
        page.meta["search"] = {"exclude": True}
        return markdown

    markdown = re.sub(r"(\d) ± (\d)", "\\1\u00a0±\u00a0\\2", markdown)
    if uri in WIDE or uri.startswith("experiments/"):
        page.meta["hide"] = ["toc"]

    def moved(found: re.Match) -> str:
        before, link, after = found.groups()
        if re.match(r"\w+:", link):
            return found[0]
        up = "../" * uri.count("/")
        return f"{before}{up}{site_path(repo_path(uri, link))}{after}"

    blocks = re.split(r"(^ *```.*?^ *```\s*?$)", markdown, flags=re.MULTILINE | re.DOTALL)
    blocks[::2] = [MATH.sub(formula, LINK.sub(moved, text)) for text in blocks[::2]]
    return "".join(blocks)


def on_page_content(html, page, config, files):
    """Allow line breaks in names only after dots, bars and the like."""
    names = re.compile(r"(<code>)([^<]*)(</code>)")
    return names.sub(lambda m: m[1] + re.sub(r"([._/=])(?=\w)", r"\1<wbr>", m[2]) + m[3], html)


def formula(found: re.Match) -> str:
    """Return HTML of TeX with letters, indices and upright words."""
    text = re.sub(r"\\(?:mathrm|text)\{([^}]*)\}", lambda m: f"<b>{m[1]}</b>", found[1])
    text = re.sub(r"\\([A-Za-z]+|\||,) ?", lambda m: SYMBOLS[m[1]], text)
    while (
        deeper := re.sub(r"_(?:\{([^{}]*)\}|([^\W_]|<b>.*?</b>))", r"<sub>\1\2</sub>", text)
    ) != text:
        text = deeper
    return f'<span class="formula">{text}</span>'
