"""What the site has beside the pages of docs/: the README as its first page, tutorials and the Python interface.

Links to files outside of docs/ are kept for images, which become part of the site; of others the text stays.
"""

import ast
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("sparse_opt", "models", "data_pipeline", "trainer")
# [text](../path) and ![text](../path), whose path may end in #anchor.
OUTSIDE = re.compile(r"(!?)\[([^\]]*)\]\(\.\./([^)#\s]+)[^)]*\)")
ROLE = re.compile(r":(?:class|func|meth|data|attr):<code>")


def exported(package: str) -> list[str]:
    """The names in ``__all__`` of a package, without importing it."""
    tree = ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8"))
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    found = next(node.value for node in assigned if ast.unparse(node.targets[0]) == "__all__")
    names: list[str] = ast.literal_eval(found)
    return names


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made here, and the images that pages show from outside of docs/."""
    for file in [each for each in files if each.src_uri.endswith(".py")]:
        files.remove(file)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    images = {path for mark, _, path in re.findall(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", readme) if mark}
    readme = re.sub(r"\]\(docs/", "](", re.sub(r"\]\((?!docs/|https?:|#)", "](../", readme))
    made = {"index.md": readme}
    for tutorial in sorted((ROOT / "docs" / "tutorials").glob("*.py")):
        code = tutorial.read_text(encoding="utf-8")
        title, _, rest = code.removeprefix('"""').partition("\n\n")
        made[f"tutorials/{tutorial.stem}.md"] = f"# {title}\n\n{rest.partition(chr(34) * 3)[0]}\n```python\n{code}```\n"
    for name in PACKAGES:
        members = "".join(
            f"\n::: cowrec.{name}.{each}\n    options: {{show_root_heading: true, show_root_toc_entry: true}}\n"
            for each in exported(name)
            if not each.startswith("_")
        )
        made[f"api/{name}.md"] = f"# cowrec.{name}\n{members}"
    for uri, content in made.items():
        files.append(File.generated(config, uri, content=content))
    for page in files.documentation_pages():
        images |= {path for mark, _, path in OUTSIDE.findall(page.content_string) if mark}
    for path in images:
        files.append(File.generated(config, f"repository/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Redirects links that leave docs/."""

    def redirected(link: re.Match) -> str:
        mark, text, path = link.groups()
        if mark:
            return f"![{text}](repository/{path})"
        return f"[{text}](index.md)" if path == "README.md" else text

    markdown = re.sub(r"\]\(tutorials/(\w+)\.py\)", r"](tutorials/\1.md)", markdown)
    return OUTSIDE.sub(redirected, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leaves out the roles of names in docstrings."""
    return ROLE.sub("<code>", html)
