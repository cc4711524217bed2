"""What is generated from the declared settings is what they say now."""

from __future__ import annotations

from pathlib import Path

from shoal.experiment import settings_page

ROOT = Path(__file__).parents[2]


def test_the_types_of_shoal_run_are_up_to_date():
    assert settings_page.TYPES_FILE.read_text() == settings_page.types_source(), "run `make docs`"


def test_the_page_is_up_to_date():
    assert settings_page.PAGE_FILE == ROOT / "docs/settings.md"
    assert settings_page.PAGE_FILE.read_text() == settings_page.page_text(), "run `make docs`"


def test_the_command_writes_both_and_no_more(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(settings_page, "TYPES_FILE", tmp_path / "settings.py")
    monkeypatch.setattr(settings_page, "PAGE_FILE", tmp_path / "settings.md")
    settings_page.main()
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {
        "settings.py": settings_page.types_source(),
        "settings.md": settings_page.page_text(),
    }


def test_a_row_has_all_that_is_declared():
    assert "| `lr` | `--lr` | number | `0.1` | above 0 | Use this learning rate" in settings_page.page_text()
    assert "| `drop_columns` | `--drop-column` | list of texts | no column |  | Leave" in settings_page.page_text()
    assert "| `variant` | none | text | the method's name |  | Show" in settings_page.page_text()


def test_contributors_are_shown_a_real_declaration():
    example = (ROOT / "docs/contributing.md").read_text().partition("```python\n")[2].partition("\n```")[0]
    assert example in (ROOT / "src/shoal/experiment/job.py").read_text()
