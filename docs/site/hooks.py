"""What the site has beside the pages of docs/: the README as its first page, tutorials and the Python interface.

Links to files outside of docs/ are kept for images, which become part of the site; of others the text stays.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
TASKS = {
    "trainer": {
        "Train and predict": "fit load FittedModel",
        "The same in steps": "load_config save_config RunConfig train evaluate predict export_model show_log",
    },
    "sparse_opt": {
        "Clip in a TorchRec job": "attach_cowclip LookupsHandle TableStats detach_cowclip",
        "The optimizer of the paper": "EmbeddingAdam AdamConfig FtrlConfig RowInitializer",
        "Values for a larger batch": "scale_hyperparameters scale_clip Hyperparameters SCALING_RULES Preset PRESETS",
        "Clip rules": "CowClip ReferenceCowClip ConstantClip FieldClip AdaptiveFieldClip GlobalClip NoClip ClipRule"
        " RowLimit CLIP_RULES",
        "Formulas on tensors": "cowclip_limits clip_scales clip_rows clip_tables",
        "Id tables": "IdTables IdTableConfig Admission NewRows Entries rows_for hashed_ids id_bucket_rows",
    },
    "models": {
        "Build a network": "build_model build_network ModelConfig MODELS require_model LOSSES loss_of l2_kernels",
        "Write a network": "EmbeddingFront Features SequenceField SequenceRows physical_dim",
    },
    "data_pipeline": {
        "Prepare raw files": "infer_schema InferredSchema prepare PrepareConfig work_bytes",
        "Read prepared data": "Reader Batch Schema DenseField SparseField Split resident_bytes available_bytes MISSING"
        " OUT_OF_VOCABULARY RESERVED_ROWS",
        "Synthetic data": "synthesize SynthesizeConfig synthesize_drifting",
        "Streams and requests": "open_source SampleSource SampleStream StreamBatch Chunk Position RawSamples"
        " SampleCodec Encoded BadSample",
    },
}
"""The public names of each package, by task. A test checks that the lists are complete."""
# [text](../path) and ![text](../path), whose path may end in #anchor.
OUTSIDE = re.compile(r"(!?)\[([^\]]*)\]\(\.\./([^)#\s]+)[^)]*\)")
ROLE = re.compile(r":(?:class|func|meth|data|attr):<code>")


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
    for package, tasks in TASKS.items():
        page, options = f"# cowrec.{package}\n", "options: {show_root_heading: true, show_root_toc_entry: true}"
        for task, names in tasks.items():
            page += f"\n## {task}\n"
            for name in names.split():
                page += f"\n::: cowrec.{package}.{name}\n    {options}\n"
        made[f"api/{package}.md"] = page
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
