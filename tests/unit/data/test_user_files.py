from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from shoal.data import load
from shoal.errors import UserError

RNG = np.random.default_rng(0)
X = RNG.normal(5.0, 2.0, (40, 3))
Y = np.tile([0, 1], 20)


def save(path: Path, **arrays: object) -> str:
    np.savez(path / "own.npz", **arrays)  # type: ignore[arg-type]
    return str(path / "own.npz")


def write(path: Path, text: str) -> str:
    (path / "own.csv").write_text(text)
    return str(path / "own.csv")


def csv(path: Path, header: str, rows: list[str]) -> str:
    return write(path, "\n".join([header, *rows]) + "\n")


def images(folder: Path, names: list[str], size: tuple[int, int] = (4, 3), mode: str = "L") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for i, name in enumerate(names):
        Image.new(mode, size, 10 * i if mode == "L" else (10 * i, 0, 255)).save(folder / name)


@pytest.mark.parametrize(("a", "b"), [("x", "y"), ("X", "Y"), ("images", "labels"), ("X", "y")])
def test_npz_holds_out_a_stratified_fifth(tmp_path: Path, a: str, b: str) -> None:
    d = load(save(tmp_path, **{a: X, b: Y}))
    assert d.name == "own"
    assert d.train.x.shape == (32, 3) and d.train.x.dtype == torch.float32
    assert d.train.y.bincount().tolist() == [16, 16]
    assert d.test.y.bincount().tolist() == [4, 4]
    assert d.classes == ("0", "1")
    assert torch.allclose(d.train.x.mean(0), torch.zeros(3), atol=1e-5)
    assert torch.allclose(d.train.x.std(0, correction=0), torch.ones(3), atol=1e-5)


def test_the_held_out_part_follows_the_seed(tmp_path: Path) -> None:
    path = save(tmp_path, x=X, y=Y)
    assert torch.equal(load(path, seed=1).test.x, load(path, seed=1).test.x)
    assert not torch.equal(load(path, seed=1).test.x, load(path, seed=2).test.x)


def test_npz_with_all_its_parts(tmp_path: Path) -> None:
    d = load(save(tmp_path, x=X, y=Y, x_test=X[:2] * 2, y_test=Y[:2], client=["a", "b"] * 20, classes=["no", "yes"]))
    assert d.classes == ("no", "yes")
    assert d.owner == ("a", "b") * 20
    mean, std = X.mean(0), X.std(0)
    assert np.allclose(d.test.x.numpy(), (X[:2] * 2 - mean) / std, atol=1e-5)
    assert d.test.y.tolist() == [0, 1]


def test_owners_follow_the_training_samples(tmp_path: Path) -> None:
    x = np.arange(40.0)[:, None]
    d = load(save(tmp_path, x=x, y=Y, client=[f"k{i:02d}" for i in range(40)]))
    assert d.owner is not None and len(d.owner) == 32
    order = d.train.x[:, 0].argsort()
    assert [d.owner[i] for i in order] == sorted(d.owner)


@pytest.mark.parametrize(
    ("shape", "input_shape"),
    [((40, 5, 6), (1, 5, 6)), ((40, 5, 6, 3), (3, 5, 6)), ((40, 3, 5, 6), (3, 5, 6)), ((40, 7), (7,))],
)
def test_images_get_their_channels_first(tmp_path: Path, shape, input_shape) -> None:
    d = load(save(tmp_path, x=RNG.integers(0, 256, shape, dtype=np.uint8), y=Y))
    assert d.input_shape == input_shape


def test_large_offsets_keep_their_digits(tmp_path: Path) -> None:
    x = (1.7e9 + np.arange(40.0))[:, None]
    d = load(save(tmp_path, x=x, y=Y, x_test=x, y_test=Y))
    assert len(d.test.x.unique()) == 40


def test_labels_of_any_type_become_sorted_classes(tmp_path: Path) -> None:
    d = load(save(tmp_path, x=X, y=np.array(["pear", "apple"] * 20)))
    assert d.classes == ("apple", "pear")
    assert load(save(tmp_path, x=X, y=np.array([10.0, 9.0] * 20))).classes == ("9", "10")
    assert load(save(tmp_path, x=X, y=np.array([-5, 12] * 20))).classes == ("-5", "12")


def with_nan() -> np.ndarray:
    x = X.copy()
    x[:2, 1] = np.nan
    return x


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, "one of the arrays y, Y, labels is needed; the arrays are x"),
        ({"a": X, "y": Y}, "one of the arrays x, X, images is needed; the arrays are a, y"),
        ({"x": X, "y": Y[:-1]}, "40 samples but 39 labels"),
        ({"x": X, "y": np.zeros(40, int)}, "at least 2 classes, but every label is '0'"),
        ({"x": with_nan(), "y": Y}, "column '1' has 2 values that are missing, NaN, infinite"),
        ({"x": np.ones((40, 3)), "y": Y}, "every feature is the same number, 1.0"),
        ({"x": X, "y": Y + 0.5}, "label 0.5 is not a class"),
        ({"x": X, "y": np.full(40, np.nan)}, "40 labels are missing"),
        ({"x": X, "y": X}, r"labels have shape \(40, 3\)"),
        ({"x": X[:, 0], "y": Y}, "features have 1 axes"),
        ({"x": X.astype(str), "y": Y}, "features are of type <U.*must be numbers"),
        ({"x": X[:0], "y": Y[:0]}, "no samples or no features"),
        ({"x": X, "y": Y, "x_test": X}, "one of the arrays y_test, Y_test, labels_test is needed"),
        ({"x": X, "y": Y, "x_test": X, "y_test": Y + 1}, "the test part: label '2' does not occur in the training"),
        ({"x": X, "y": Y, "x_test": X[:, :2], "y_test": Y}, r"test part have shape \(2,\), but they must have \(3,\)"),
        ({"x": X, "y": Y, "client": ["a"]}, r"clients have shape \(1,\)"),
        ({"x": X, "y": Y + 1, "classes": ["no", "yes"]}, "labels must be in 0..1"),
        ({"x": X, "y": np.array([{}] * 40)}, "arrays of Python objects are refused"),
    ],
)
def test_wrong_npz_files_are_refused(tmp_path: Path, arrays: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(save(tmp_path, **arrays))


def test_one_constant_pixel_is_no_error(tmp_path: Path) -> None:
    x = X.copy()
    x[:, 0] = 7
    d = load(save(tmp_path, x=x, y=Y))
    assert d.train.x[:, 0].abs().max() == 0


def test_truncated_and_empty_npz(tmp_path: Path) -> None:
    path = save(tmp_path, x=X, y=Y)
    Path(path).write_bytes(Path(path).read_bytes()[:-40])
    with pytest.raises(UserError, match=r"truncated or not an .npz file"):
        load(path)
    Path(path).write_bytes(b"")
    with pytest.raises(UserError, match="the file is empty"):
        load(path)
    Path(path).write_bytes(b"hello, this is text")
    with pytest.raises(UserError, match=r"own.npz: "):
        load(path)


ROWS = [f"{i % 7},{i * 0.5},{'yes' if i % 2 else 'no'},site{i % 4}" for i in range(40)]


def test_csv_with_labels_and_clients(tmp_path: Path) -> None:
    d = load(csv(tmp_path, "a,b,y,site", ROWS), label_column="y", client_column="site")
    assert d.input_shape == (2,)
    assert d.classes == ("no", "yes")
    assert d.owner is not None and set(d.owner) == {"site0", "site1", "site2", "site3"}
    assert torch.allclose(d.train.x.std(0, correction=0), torch.ones(2), atol=1e-5)


def test_parquet_with_lists(tmp_path: Path) -> None:
    n = 20
    table = pa.table(
        {
            "pixels": pa.array([[0, i, 2 * i] for i in range(n)]),
            "fixed": pa.array([[i, -i] for i in range(n)], pa.list_(pa.float32(), 2)),
            "flag": pa.array([i % 3 == 0 for i in range(n)]),
            "label": pa.array(["a", "b"] * (n // 2)).dictionary_encode(),
        }
    )
    pa.parquet.write_table(table, tmp_path / "own.parquet")
    d = load(str(tmp_path / "own.parquet"))
    assert d.input_shape == (6,)
    assert d.classes == ("a", "b")
    assert d.train.x[:, 0].abs().max() == 0
    assert torch.allclose(d.train.x[:, 3], -d.train.x[:, 4])


def test_parquet_with_ragged_lists(tmp_path: Path) -> None:
    table = pa.table({"pixels": pa.array([[1], [1, 2]]), "label": [0, 1]})
    pa.parquet.write_table(table, tmp_path / "own.parquet")
    with pytest.raises(UserError, match="the lists in column 'pixels' differ in length"):
        load(str(tmp_path / "own.parquet"))


def test_truncated_parquet(tmp_path: Path) -> None:
    path = tmp_path / "own.parquet"
    pa.parquet.write_table(pa.table({"a": [1, 2], "label": [0, 1]}), path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match="cannot be read as a parquet table"):
        load(str(path))


@pytest.mark.parametrize(
    ("header", "rows", "options", "message"),
    [
        ("a,b,y,site", ROWS, {}, "no label column 'label'; the columns are a, b, y, site"),
        ("a,b,label,site", ROWS, {"client_column": "owner"}, "no client column 'owner'; the columns are a, b, label"),
        ("a,b,label,site", ROWS, {"drop_columns": ["c"]}, "no drop column 'c'"),
        ("a,b,label,site", ROWS, {}, "column 'site' is of type string.*--drop-column site"),
        ("a,a,label,site", ROWS, {}, "2 columns named 'a'"),
        ("a,b,label,c", [f"{i},1,{i % 2},{i}" for i in range(40)], {}, "column 'b' is the same.*--drop-column b"),
        ("a,b,label", [",1,x", ",2,y", "3,4,x"], {}, "column 'a' has 2 values that are missing"),
        ("a,b,label", ["1,1,0", "2,2,", "3,4,1"], {}, "1 rows have no label in column 'label'"),
        ("a,label", [], {}, "columns but no rows"),
        ("label", ["0", "1"], {}, "no feature columns"),
        ("a,label", ["1,0", "2"], {}, "cannot be read as a csv table"),
        ("a,label", ["1,0"], {}, r"1 sample\(s\) cannot be divided"),
    ],
)
def test_wrong_csv_files_are_refused(tmp_path: Path, header: str, rows: list[str], options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(csv(tmp_path, header, rows), **options)


def test_columns_can_be_dropped(tmp_path: Path) -> None:
    d = load(csv(tmp_path, "a,b,label,site", ROWS), drop_columns=["site", "a"])
    assert d.input_shape == (1,)


def test_an_empty_csv(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the file is empty"):
        load(write(tmp_path, ""))


def test_folder_of_images(tmp_path: Path) -> None:
    images(tmp_path / "own" / "cat", [f"{i}.png" for i in range(5)])
    images(tmp_path / "own" / "dog", [f"{i}.PNG" for i in range(5)])
    (tmp_path / "own" / "dog" / "notes.txt").write_text("not an image")
    d = load(str(tmp_path / "own"))
    assert d.name == "own"
    assert d.classes == ("cat", "dog")
    assert d.input_shape == (1, 3, 4)
    assert (len(d.train.y), len(d.test.y)) == (8, 2)
    assert d.test.y.tolist() == [0, 1]


def test_folder_with_a_test_part(tmp_path: Path) -> None:
    for part, count in (("train", 3), ("test", 1)):
        for kind in ("cat", "dog"):
            images(tmp_path / part / kind, [f"{i}.jpg" for i in range(count)], mode="RGB")
    d = load(str(tmp_path))
    assert (len(d.train.y), len(d.test.y)) == (6, 2)
    assert d.input_shape == (3, 3, 4)


def test_images_that_differ_are_named(tmp_path: Path) -> None:
    images(tmp_path / "cat", ["a.png", "b.png"])
    images(tmp_path / "dog", ["a.png"])
    images(tmp_path / "dog", ["b.png"], size=(5, 3))
    with pytest.raises(UserError, match=r"dog/b.png is 5 x 3 L, but .*cat/a.png is 4 x 3 L"):
        load(str(tmp_path))
    images(tmp_path / "dog", ["b.png"], mode="RGB")
    with pytest.raises(UserError, match=r"dog/b.png is 4 x 3 RGB, but .*cat/a.png is 4 x 3 L"):
        load(str(tmp_path))


def test_wrong_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no images in it"):
        load(str(tmp_path))
    images(tmp_path / "cat", ["a.png", "b.png"])
    with pytest.raises(UserError, match="at least 2 classes, but every label is 'cat'"):
        load(str(tmp_path))
    (tmp_path / "dog").mkdir()
    with pytest.raises(UserError, match="dog: a class folder without any image"):
        load(str(tmp_path))
    Image.fromarray(RNG.integers(0, 256, (30, 40), dtype=np.uint8)).save(tmp_path / "dog" / "a.png")
    content = (tmp_path / "dog" / "a.png").read_bytes()
    (tmp_path / "dog" / "a.png").write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"dog/a.png: not a complete image"):
        load(str(tmp_path))
    with pytest.raises(UserError, match=r"client_column is 'site', but .* is not a table"):
        load(str(tmp_path), client_column="site")


def test_wrong_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent.csv' does not exist"):
        load(str(tmp_path / "absent.csv"))
    (tmp_path / "own.txt").write_text("x")
    with pytest.raises(UserError, match=r"ends in '.txt', but it must be a folder or end in .npz, .csv, .parquet"):
        load(str(tmp_path / "own.txt"))


TEXT = "größe,b,label\n" + "".join(f"{i},{i * i},{'süß' if i % 2 else 'herb'}\n" for i in range(40))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("separator", [",", "\t"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_csv_in_unicode_is_read_whatever_its_form(tmp_path: Path, encoding: str, separator: str, end: str) -> None:
    text = TEXT.replace(",", separator).replace("\n", end)
    mark = "\ufeff" if encoding in ("utf-16-le", "utf-16-be") else ""  # Excel writes one too
    (tmp_path / "own.csv").write_bytes((mark + text).encode(encoding))
    d = load(str(tmp_path / "own.csv"))
    assert d.classes == ("herb", "süß")
    assert d.preparation is not None and d.preparation.columns == ("größe", "b")
    assert torch.equal(d.train.x, load(write(tmp_path, TEXT)).train.x)


def test_a_tab_within_a_name_separates_nothing_where_there_are_commas(tmp_path: Path) -> None:
    d = load(csv(tmp_path, '"a\tb",c,label', [f"{i},{i * i},{i % 2}" for i in range(40)]))
    assert d.preparation is not None and d.preparation.columns == ("a\tb", "c")


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252"])
def test_a_csv_in_an_old_encoding_is_refused_by_line_and_byte(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "own.csv"
    path.write_bytes(TEXT.encode(encoding))
    with pytest.raises(UserError) as refused:
        load(str(path))
    assert str(refused.value) == (
        f"{path}, line 1, byte 3: 0xF6 is not UTF-8 (in Windows-1252 it is 'ö'). Save the file as UTF-8; Excel "
        "calls it 'CSV UTF-8'."
    )
    path.write_bytes(TEXT.replace("größe", "a").encode(encoding))
    with pytest.raises(UserError, match=r"own.csv, line 3, byte 6: 0xFC is not UTF-8 \(in Windows-1252 it is 'ü'\)"):
        load(str(path))
    with pytest.raises(UserError, match=r"own.csv, line 3, byte 6: 0xFC"):
        load(str(path), label_column="b", client_column="label")


def test_a_column_that_is_dropped_may_be_in_any_encoding(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_bytes("".join(f"{i},ä,{i % 2}\n" if i else "a,b,label\n" for i in range(40)).encode("latin-1"))
    assert load(str(path), drop_columns=["b"]).input_shape == (1,)
    with pytest.raises(UserError, match=r"column 'b' is of type binary, but features must be numbers"):
        load(str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (TEXT.encode("utf-16-le"), r"line 1, byte 2: 0x00 is not text.*UTF-16 needs a byte order mark"),
        (TEXT.encode("utf-32"), r"0x00 is not text"),
        (TEXT.encode("utf-16")[:-1], r"own.csv: starts as UTF-16, but it is not UTF-16.*truncated data"),
        (b"\xff\xfe\x00\xd8a\x00", r"own.csv: starts as UTF-16, but it is not UTF-16.*illegal"),
        ("\ufeff".encode("utf-16-le"), "cannot be read as a csv table: Empty CSV file"),
        (b"\xef\xbb\xbf", "cannot be read as a csv table: Empty CSV file"),
        (TEXT.replace(",", ";").encode(), "no label column 'label'.*separated by something other than commas?"),
    ],
)
def test_wrong_text_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "own.csv").write_bytes(content)
    with pytest.raises(UserError, match=message):
        load(str(tmp_path / "own.csv"))


def test_a_single_array_is_no_npz(tmp_path: Path) -> None:
    with (tmp_path / "own.npz").open("wb") as file:
        np.save(file, X)
    with pytest.raises(
        UserError, match=r"own.npz contains a single array \(.npy\), but it must be an .npz file with x and y"
    ):
        load(str(tmp_path / "own.npz"))


@pytest.mark.parametrize("name", ["own.csv", "own.npz", "own.parquet"])
def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(pyarrow.parquet, "ParquetFile", refuse)
    with pytest.raises(UserError, match=f"{name}: cannot be read.*Permission denied"):
        load(str(tmp_path / name))
