"""Old names, help texts without a verb and avoided words are found, and nothing else is."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import check_words
import pytest
from check_words import has_verb, help_findings, name_findings, page_findings, read_old_names
from glossary import Style, Term, Vocabulary, read_vocabulary

ROOT = Path(__file__).parents[3]
VOCABULARY = Vocabulary(
    terms=(
        Term("client", "A device.", avoid=("whoever", "who trains")),
        Term("personal model", "A model of one client.", avoid=("own model",)),
        Term("metric", "A number.", avoid=("figure",), use="metric or plot"),
    ),
    style=(Style("at random", ("by chance",)),),
    allowed_phrases=("your own model",),
)
OLD_NAMES = """
allowed = ["src/shoal/data.py:held", "src/shoal/data.py:Federate"]

scoped = [
  { name = "held", kind = "field", owner = "Task", use = "cached" },
  { name = "told", kind = "function", path = "src/shoal/cli", use = "user_errors" },
  { name = "every", kind = "option", use = "every_rounds" },
  { name = "of", kind = ["parameter", "field"], owner = ["compare", "Request"], use = "reference" },
  { name = "needs", kind = "field", owner = "Piece", use = "requires" },
  { name = "train", kind = "key", owner = ["joules", "PARTS"], use = "training" },
  { name = "ala", kind = "group", use = "local_aggregation" },
]

[names]
Federate = "TrainAndAggregate"
bench = "experiment"
LONG = "EDGE_CLOUD"

[keys]
rounds_done = "completed_rounds"
"""


@pytest.fixture
def old(tmp_path):
    path = tmp_path / "old_names.toml"
    path.write_text(OLD_NAMES)
    return read_old_names(path)


def lines(findings):
    return [str(finding) for finding in findings]


def named(old, text, path="src/shoal/engine.py", **others):
    return lines(name_findings({path: dedent(text), **others}, old))


class TestNames:
    @pytest.mark.parametrize(
        ("text", "line", "name"),
        [
            ("class Federate: ...", 1, "Federate"),
            ("def bench(): ...", 1, "bench"),
            ("async def bench(): ...", 1, "bench"),
            ("def run(\n    job,\n    *,\n    bench,\n): ...", 4, "bench"),
            ("def run(**bench): ...", 1, "bench"),
            ("class Run:\n    bench: int = 0", 2, "bench"),
            ("class Run:\n    bench = 0", 2, "bench"),
            ("class Run:\n    def __init__(self):\n        self.bench = 0", 3, "bench"),
            ("def outer():\n    def bench(): ...", 2, "bench"),
            ("LONG = 'long'", 1, "LONG"),
            ("LONG: str = 'long'", 1, "LONG"),
        ],
    )
    def test_every_kind_of_definition_is_found(self, old, text, line, name):
        (finding,) = name_findings({"src/shoal/engine.py": text}, old)
        assert (finding.line, finding.message) == (
            line,
            f'word "{name}": use "{ {entry.name: entry.use for entry in old.names}[name] }"',
        )

    @pytest.mark.parametrize(
        "text",
        [
            "class TrainAndAggregate: ...",
            "bench()",
            "run(bench=1)",
            "text = 'bench'",
            "from old import Federate",
            "def run():\n    bench = 1",
            "state.bench = 1",
            "x = {'bench': 1}",
        ],
    )
    def test_uses_and_locals_are_not_definitions(self, old, text):
        assert named(old, text) == []

    def test_a_finding_says_where_and_what_to_use(self, old):
        assert named(old, "\nclass Federate: ...", "src/shoal/a.py") == [
            'src/shoal/a.py:2: word "Federate": use "TrainAndAggregate"'
        ]

    def test_an_allowed_name_is_no_finding(self, old):
        assert named(old, "class Federate: ...", "src/shoal/data.py") == []

    def test_a_field_is_old_in_its_class_only(self, old):
        assert named(old, "class Task:\n    held: int = 0") == ['src/shoal/engine.py:2: word "held": use "cached"']
        assert named(old, "class Window:\n    held: int = 0\ndef run(held): ...") == []

    def test_a_name_of_a_base_class_is_old_in_classes_that_derive_from_it(self, old):
        piece = "class Piece:\n    requires = ()\nclass Cluster(Piece): ..."
        mine = "import shoal\nclass Mine(shoal.Cluster):\n    needs = ()\nclass Other:\n    needs = ()"
        assert named(old, piece, **{"tests/mine.py": mine}) == ['tests/mine.py:3: word "needs": use "requires"']

    def test_a_path_is_a_file_or_a_folder(self, old):
        assert len(named(old, "def told(): ...", "src/shoal/cli/base.py")) == 1
        assert named(old, "def told(): ...", "src/shoal/client/base.py") == []

    def test_several_kinds_and_owners(self, old):
        text = "def compare(of): ...\nclass Request:\n    of: str\ndef run(of): ..."
        assert [line.split(":")[1] for line in named(old, text)] == ["1", "3"]

    def test_an_option_is_a_field_that_is_declared_so(self, old):
        text = "class Probe:\n    every: int = option(20, 'Probe again.')\nclass Rounds:\n    every: int = 1"
        assert named(old, text) == ['src/shoal/engine.py:2: word "every": use "every_rounds"']

    def test_a_group_of_options_is_the_value_of_group(self, old):
        text = "class A:\n    group: ClassVar[str] = 'ala'\nclass B:\n    name: str = 'ala'"
        assert named(old, text) == ['src/shoal/engine.py:2: word "ala": use "local_aggregation"']

    @pytest.mark.parametrize(
        "text",
        ["x = {'rounds_done': 3}", "def f(x):\n    x['rounds_done'] = 3", "def f():\n    return dict(rounds_done=3)"],
    )
    def test_keys_that_are_written(self, old, text):
        assert len(named(old, text)) == 1

    def test_keys_that_are_read_may_be_of_an_old_file(self, old):
        assert named(old, "def f(x):\n    return x['rounds_done']") == []

    def test_a_key_is_old_inside_of_another(self, old):
        assert named(old, "x = {'joules': {'train': 1}, 'train': 2}") == [
            'src/shoal/engine.py:1: word "train": use "training"'
        ]
        assert len(named(old, "PARTS = ('pre', 'train')")) == 1
        assert named(old, "SPLITS = ('train', 'test')") == []

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("scoped = [{ name = 'a', kind = 'feild', use = 'b' }]", "unknown kind feild"),
            ("scoped = [{ name = 'a', kind = 'field', used = 'b' }]", "unknown key used"),
            ("[fields]\na = 'b'", "unknown key fields"),
        ],
    )
    def test_mistakes_in_the_list_are_refused(self, tmp_path, text, message):
        (tmp_path / "old.toml").write_text(text)
        with pytest.raises(ValueError, match=message):
            read_old_names(tmp_path / "old.toml")

    def test_no_new_name_of_the_project_is_an_old_one(self):
        old = read_old_names(ROOT / "docs/old_names.toml")
        everywhere = {entry.name for entry in old.names if not entry.owners and not entry.paths}
        assert {entry.use for entry in old.names if not entry.owners and not entry.paths} & everywhere == set()
        assert len({(e.name, e.kinds, e.owners, e.paths) for e in old.names}) == len(old.names)


VERBS = [
    "Train for this many global rounds.",
    "Also charge a client for the joules that it uses while it waits.",
    "Do not split a cluster if a part would have fewer clients than this.",
    "After the warm-up, survey all losses before and after one round.",
    "Weight the models by their numbers of samples.",
    "List, download and show data sets.",
    "Two clients are neighbours if their distance is at most this.",
    "A cluster's time budget per round is this fraction of the summed training time.",
    "With cold a client that has never trained is represented by the first model.",
    "0 probes only once.",
    "The value 0 sets no limit.",
    "With fewer, no client trains.",
    "What the server uses does not count.",
    "Rounds in which fewer than two clients trained do not count.",
    "The method scmoe shares no model that was trained on sensitive samples.",
    "This needs `--key`.",
    "`shoal methods` lists them.",
]
FRAGMENTS = [
    "Momentum of the server's update of every model.",
    "Decay of the moving average of the models that are served.",
    "Samples on which a client compares the accuracy of its experts.",
    "Learning rates to choose from, separated by commas, in ascending order.",
    "Smallest number of clients with samples in a sum.",
    "Whether logits are adjusted by the class prior.",
    "Pseudocount of the class prior: samples that are added to a client's label counts.",
    "Joules of each client, which are modelled.",
    "One table and one page for several runs.",
    "Where the time of a method's rounds goes.",
    "Weight decay.",
    "List, table and page of the runs.",
    "Weight, bytes and joules of a model.",
    "Number of rounds.",
    "Use of edge servers.",
    "",
]


@pytest.mark.parametrize("sentence", VERBS)
def test_a_sentence_has_a_verb(sentence):
    assert has_verb(sentence)


@pytest.mark.parametrize("sentence", FRAGMENTS)
def test_a_fragment_has_none(sentence):
    assert not has_verb(sentence)


class TestHelp:
    def found(self, text):
        return lines(help_findings("src/shoal/a.py", dedent(text), VOCABULARY))

    @pytest.mark.parametrize(
        "text",
        [
            'class A:\n    n: int = option(1, "Form this many clusters. 0 forms one.")',
            'class A:\n    n: int = setting(1, "Train for this many rounds.", panel="Training")',
            'x = typer.Option("--n", help="Use `by chance` and your own model.")',
            'x = option(1, TEXT)\ny = typer.Option("--n", help=text + ".")\nz = other(1, "no sentence")',
            '@app.command()\ndef run():\n    """Run a method.\n\n    by chance"""',
            '@app.callback()\ndef main(): ...\n\ndef help():\n    """no sentence"""',
        ],
    )
    def test_good_texts(self, text):
        assert self.found(text) == []

    def test_a_verbless_help_text_is_caught(self):
        assert self.found('\nx = option(0.7, "Momentum of the server\'s update.", ge=0)') == [
            'src/shoal/a.py:2: help text "Momentum of the server\'s update.": add a verb'
        ]

    @pytest.mark.parametrize(
        ("call", "complaint"),
        [
            ('option(1, "Form this many clusters. Default of the paper.")', '"Default of the paper." as a sentence'),
            ('option(1, "form this many clusters.")', "begin with a capital letter"),
            ('option(1, "Form this many clusters")', "end with a full stop"),
            ('option(1, help="Number of clusters.")', "add a verb"),
            ('setting(1, "Number of rounds.", panel="Training")', "add a verb"),
            ('typer.Option("--n", help="Number of rounds.")', "add a verb"),
            ('typer.Argument(help=f"Number of {x}.")', "add a verb"),
            ('typer.Typer(help="Data sets.")', "add a verb"),
            ('option(1, "Select clients by "\n"chance.")', 'word "by chance": use "at random"'),
        ],
    )
    def test_bad_texts(self, call, complaint):
        (line,) = self.found(f"x = {call}")
        assert line.startswith("src/shoal/a.py:1: ")
        assert complaint in line

    def test_a_command_without_a_sentence(self):
        assert self.found('@app.command("run")\ndef run():\n    """Where the time goes."""')[0].endswith("add a verb")
        assert any("add a verb" in line for line in self.found("@app.command()\ndef run(): ..."))


class TestPages:
    def found(self, text):
        return lines(page_findings("docs/a.md", dedent(text), VOCABULARY))

    def test_an_avoided_word_is_found_with_the_word_to_use(self):
        assert self.found("# Title\n\nWhoever trains.\n\nA figure.") == [
            'docs/a.md:3: word "Whoever": use "client"',
            'docs/a.md:5: word "figure": use "metric or plot"',
        ]

    def test_a_phrase_may_be_on_two_lines(self):
        assert self.found("- It is drawn by\n  chance.") == ['docs/a.md:1: word "by chance": use "at random"']

    def test_the_line_is_right_after_code(self):
        assert self.found("```\nby chance\n\n```\n\nby chance") == ['docs/a.md:6: word "by chance": use "at random"']

    def test_headings_tables_and_texts_of_links_are_prose(self):
        text = "# The figure\n\n| figure | x |\n|---|---|\n| figure | x |\n\n[a figure](x.md)"
        assert [line.split(":")[1] for line in self.found(text)] == ["1", "3", "5", "7"]

    @pytest.mark.parametrize(
        "text",
        [
            "Use `by chance` and ``a `figure` ``.",
            "    ```\n    by chance\n    ```",
            "[x](figure.md#a-figure) and [y]: https://example.org/figure",
            "<!-- by chance -->",
            "figures, disfigure, by chances, a figure-eight",
            "by\n\nchance",
            "Your own model is trained, and your own\nmodel is served.",
        ],
    )
    def test_everything_else_is_allowed(self, text):
        assert self.found(text) == []

    def test_an_allowed_phrase_does_not_hide_another_use(self):
        assert len(self.found("Your own model, and a client's own model.")) == 1


def test_the_command_prints_all_findings_and_exits_with_1(tmp_path, capsys):
    files = {
        "src/shoal/a.py": 'class Federate:\n    n: int = option(1, "Number.")\n',
        "tests/unit/test_a.py": "def bench(): ...\n",
        "benchmarks/b.py": "x = {'rounds_done': 1}\n",
        "README.md": "by chance\n",
        "docs/a.md": "A client who trains.\n",
        "docs/methods/b.md": "whoever\n",
        "docs/results.md": "whoever\n",
        "docs/old_names.toml": OLD_NAMES,
        "docs/vocabulary.toml": (
            'exempt_pages = ["docs/results.md"]\n[[term]]\nterm = "client"\ndefinition = "A device."\n'
            'avoid = ["whoever", "who trains", "by chance"]\n'
        ),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert check_words.main(tmp_path) == 1
    assert capsys.readouterr().out.splitlines() == [
        'README.md:1: word "by chance": use "client"',
        'benchmarks/b.py:1: word "rounds_done": use "completed_rounds"',
        'docs/a.md:1: word "who trains": use "client"',
        'docs/methods/b.md:1: word "whoever": use "client"',
        'src/shoal/a.py:1: word "Federate": use "TrainAndAggregate"',
        'src/shoal/a.py:2: help text "Number.": add a verb',
        'tests/unit/test_a.py:1: word "bench": use "experiment"',
    ]
    for name in ("src/shoal/a.py", "tests/unit/test_a.py", "benchmarks/b.py", "README.md", "docs/a.md"):
        (tmp_path / name).write_text("")
    (tmp_path / "docs/methods/b.md").write_text("")
    assert check_words.main(tmp_path) == 0
    assert capsys.readouterr().out == ""


def test_no_definition_of_the_glossary_has_an_avoided_word():
    page = (ROOT / "docs/glossary.md").read_text()
    assert lines(page_findings("docs/glossary.md", page, read_vocabulary())) == []
