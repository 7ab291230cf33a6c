"""Real federations: loaders on small files of the same formats, checksums, cards and texts."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command import Noisewise
from hypothesis import given
from hypothesis import strategies as st

from noisewise.data import (
    Scaling,
    TextDataset,
    dataset_names,
    describe_dataset,
    get_dataset,
    list_datasets,
    load_dataset,
    load_texts,
    parse_columns,
    split_dataset,
    text_records,
    verify_dataset,
)
from noisewise.data.cache import dataset_folder
from noisewise.data.federations import FEDERATIONS
from noisewise.data.texts import mail_text
from noisewise.errors import InvalidValueError, SourceError

FARS_COLUMNS = {
    "AGE": {"type": "number", "range": [0, 97], "missing": "own", "missing_codes": [99]},
    "SEX": {"type": "category", "categories": ["Male", "Female", "Unknown"], "missing": "Unknown"},
    "RACE": {"type": "drop"},
}
FILES = {
    "fars": {
        "fars.dat": "@relation fars\n"
        "@attribute CASE_STATE {Alabama,Alaska}\n"
        "@attribute AGE real [0.0,99.0]\n"
        "@attribute SEX {Male,Female,Unknown}\n"
        "@attribute RACE {White,Unknown}\n"
        "@attribute INJURY_SEVERITY {No_Injury,Fatal_Injury}\n"
        "@data\n"
        "Alaska,97,Male,White,Fatal_Injury\n"
        "Alabama,0,Female,White,No_Injury\n"
        "Alabama,99,Unknown,Unknown,Possible_Injury\n"
        "Alaska,48.5,Male,White,No_Injury\n"
    },
    "heart": {
        "processed.cleveland.data": "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0\n"
        "67.0,1.0,4.0,160.0,286.0,0.0,2.0,108.0,1.0,1.5,2.0,3.0,3.0,2\n",
        "processed.hungarian.data": "28,1,2,130,132,0,2,185,0,0,?,?,?,0\n"
        "29,1,2,140,?,0,0,170,0,0,?,?,?,1\n",
        "processed.switzerland.data": "32,1,1,95,0,?,0,127,0,.7,1,?,?,1\n"
        "35,1,4,?,0,?,0,130,1,?,?,?,7,3\n",
        "processed.va.data": "63,1,4,0,260,0,1,112,1,3,2,?,?,2\n"
        "44,1,4,130,209,0,1,127,0,0,?,?,?,0\n",
    },
    "vietnam": {
        "VietNamI.csv": '"","pharvis","lnhhexp","age","sex","married","educ","illness","injury",'
        '"illdays","actdays","insurance","commune"\n'
        '"1",0,3,0,"male",1,2,1,0,7,0,0,12\n'
        '"2",4,6.5,4.7,"female",0,0,5,1,4,0,0,7\n'
        '"3",1,0,2.35,"male",0,11,0,0,0,31,1,12\n'
    },
}
SPAM = {
    "package/data/spam-1/00002.b.txt": b"Subject: Buy\n\nNow!\n",
    "package/data/spam-1/00002.b.json": b"{}",
    "package/data/easy-ham-1/00001.a.txt": b"Subject: Hello\n\nHow are you?\n",
    "package/README.md": b"Subject: not a mail\n\n",
    "package/notes/spam-1/00009.c.txt": b"Subject: not in data\n\n",
}


def tar(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The four datasets with small files in one folder, their checksums and no other source."""
    monkeypatch.setenv("NOISEWISE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "by-hand"
    contents = {
        name: {file: text.encode() for file, text in files.items()} for name, files in FILES.items()
    }
    contents["spam"] = {next(iter(FEDERATIONS["spam"].files)): tar(SPAM)}
    for name, files in contents.items():
        (folder / name).mkdir(parents=True)
        for file, content in files.items():
            (folder / name / file).write_bytes(content)
        hashes = {file: hashlib.sha256(content).hexdigest() for file, content in files.items()}
        info = replace(FEDERATIONS[name], files=hashes, sources=())
        monkeypatch.setitem(FEDERATIONS, name, info)
    monkeypatch.setenv("NOISEWISE_DATA", str(folder))
    return folder


def test_fars() -> None:
    data = load_dataset("fars", columns=parse_columns(FARS_COLUMNS))
    assert data.train.inputs.tolist() == [
        [1, 0, 1, 0, 0],
        [-1, 0, 0, 1, 0],
        [0, 1, 0, 0, 1],
        [0, 0, 1, 0, 0],
    ]
    assert data.train.targets.tolist() == [4, 0, 1, 0]
    assert data.n_classes == 8
    assert data.group_names == ("Alabama", "Alaska")
    assert data.groups is not None
    assert data.groups.tolist() == [1, 0, 0, 1]
    with pytest.raises(InvalidValueError, match=r"fars.dat: columns = '.+': must be a column of"):
        load_dataset("fars")  # the real columns


def test_heart() -> None:
    data = load_dataset("heart")
    assert data.train.targets.tolist() == [0, 1, 0, 1, 1, 1, 1, 0]
    assert data.group_names == ("cleveland", "hungary", "switzerland", "va-long-beach")
    assert data.groups is not None
    assert data.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    coder = FEDERATIONS["heart"].coder
    assert coder is not None
    records = [dict(zip(coder.names, row, strict=True)) for row in data.train.inputs.tolist()]
    assert records[0]["sex=1"] == records[2]["sex=1"] == 1  # "1.0" and "1"
    assert [record["chol=missing"] for record in records] == [0, 0, 0, 1, 1, 1, 0, 0]
    assert [record["trestbps=missing"] for record in records] == [0, 0, 0, 0, 0, 1, 1, 0]
    assert [record["ca=missing"] for record in records] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert len(split_dataset(data, partition="natural")) == 4


def test_vietnam() -> None:
    data = load_dataset("vietnam")
    assert data.train.targets.tolist() == [0, 1, 1]
    assert data.group_names == ("commune-007", "commune-012")
    coder = FEDERATIONS["vietnam"].coder
    assert coder is not None
    second = dict(zip(coder.names, data.train.inputs[1].tolist(), strict=True))
    assert second["lnhhexp"] == 1  # clipped
    assert second["age"] == 1
    assert second["illness=3"] == 1  # five illnesses
    assert second["sex=female"] == second["injury=1"] == second["married=0"] == 1


def test_spam() -> None:
    data = load_texts("spam")
    assert data.texts == ("Hello\n\nHow are you?", "Buy\n\nNow!")
    assert data.targets.tolist() == [0, 1]
    assert data.groups.tolist() == [0, 1]
    assert data.group_names == ("easy-ham-1", "spam-1")


def test_texts_are_records_of_bytes() -> None:
    data = load_dataset("spam", text_length=16)
    assert data.train.inputs.dtype == np.uint8
    assert [bytes(record) for record in data.train.inputs] == [
        b"Hello\n\nHow are y",
        b"Buy\n\nNow!" + bytes(7),
    ]
    assert data.train.targets.tolist() == [0, 1]
    assert load_dataset("spam").train.inputs.shape == (2, 2048)
    with pytest.raises(InvalidValueError, match="text_length = 0"):
        load_dataset("spam", text_length=0)
    cut = text_records(["né\ud800"], 2)  # half a character stays; half a pair becomes "?"
    assert cut.tolist() == [[110, 0xC3]]
    assert bytes(text_records(["\ud800"], 2)[0]) == b"?\0"


def test_names_of_the_wrong_kind() -> None:
    with pytest.raises(InvalidValueError, match=r"scaling.mean = .*: spam consists of texts"):
        load_dataset("spam", scaling=Scaling((0.0,), (1.0,)))
    with pytest.raises(InvalidValueError, match="text_length = 9: cannot be used: digits has no"):
        load_dataset("digits", text_length=9)
    with pytest.raises(InvalidValueError, match="dataset = 'fars': must be one of spam"):
        load_texts("fars")
    with pytest.raises(InvalidValueError, match="cannot be used: digits is not a table"):
        load_dataset("digits", columns=parse_columns(FARS_COLUMNS))
    with pytest.raises(InvalidValueError, match="targets"):
        TextDataset("t", ("a",), np.array([1]), 1, np.array([0]), ("x",))


@pytest.mark.parametrize("name", ["fars", "heart", "vietnam", "spam"])
def test_other_bytes_are_refused_and_a_damaged_cache_is_replaced(name: str, small: Path) -> None:
    for path in (small / name).iterdir():
        good = path.read_bytes()
        path.write_bytes(good + b" ")
        with pytest.raises(SourceError, match=f"{path.name} has the SHA-256"):
            get_dataset(name)
        assert verify_dataset(name) == [f"not cached; download it with: noisewise data get {name}"]
        path.write_bytes(good)
    assert get_dataset(name).state == "cached"
    for cached in dataset_folder(name).iterdir():
        cached.write_bytes(b"damaged")
        assert cached.name in verify_dataset(name)[0]
        get_dataset(name)
        assert verify_dataset(name) == []
        cached.unlink()
        assert verify_dataset(name)
        get_dataset(name)
    assert not list(dataset_folder(name).glob(".new-*"))


def test_a_folder_may_hold_the_archive(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOISEWISE_DATA")
    with zipfile.ZipFile(tmp_path / "heart+disease.zip", "w") as archive:
        archive.writestr("Index", "x")
        for path in (small / "heart").iterdir():
            archive.write(path, path.name)
    data = load_dataset("heart", folder=tmp_path)
    assert len(data.train) == 8
    (tmp_path / "heart+disease.zip").write_bytes(b"PK\x03\x04 damaged")
    (dataset_folder("heart") / "processed.va.data").unlink()
    with pytest.raises(SourceError, match=r"heart\+disease.zip is damaged"):
        get_dataset("heart", tmp_path)


@pytest.mark.parametrize(("local", "central", "value"), [(6, 8, 1), (8, 10, 99)])
def test_an_archive_that_python_cannot_read_is_one_line(
    local: int, central: int, value: int, tmp_path: Path, small: Path
) -> None:
    """It is encrypted, or compressed in another way."""
    path = tmp_path / "heart+disease.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for file in (small / "heart").iterdir():
            archive.write(file, file.name)
    content = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\x03\x04", local), (b"PK\x01\x02", central)):
        for found in re.finditer(re.escape(signature), content):
            content[found.start() + offset] = value
    path.write_bytes(content)
    with pytest.raises(SourceError, match=r"heart\+disease.zip is damaged: .*(encr|compression)"):
        get_dataset("heart", tmp_path)


def test_without_any_source_the_message_lists_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOISEWISE_DATA")
    with pytest.raises(SourceError) as caught:
        load_dataset("heart")
    text = str(caught.value)
    assert "noisewise data get heart --folder FOLDER" in text
    assert "processed.cleveland.data, processed.hungarian.data" in text
    assert "or heart+disease.zip" in text


def test_a_cell_that_cannot_be_read_names_line_and_column(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = small / "heart" / "processed.va.data"
    for old, new, words in [
        ("44,", "old,", "processed.va.data, line 2, column age = 'old': must be a finite number"),
        ("0,0,?,?,?,0", "0,0,?,?,?,x", "line 2, column num = 'x': must be a number"),
        ("44,1", "44", "line 2, column cells = 13: must be 14"),
    ]:
        content = FILES["heart"][path.name].replace(old, new)
        path.write_text(content)
        info = FEDERATIONS["heart"]
        digest = hashlib.sha256(content.encode()).hexdigest()
        monkeypatch.setitem(
            FEDERATIONS, "heart", replace(info, files={**info.files, path.name: digest})
        )
        with pytest.raises(InvalidValueError, match=words):
            load_dataset("heart")


# Cards.


def test_every_federation_has_a_card() -> None:
    assert set(FEDERATIONS) <= set(dataset_names())
    for name, info in FEDERATIONS.items():
        text = " ".join(describe_dataset(name).split())
        for words in [info.card.licence, info.card.client, info.card.target, *info.card.leaks]:
            assert " ".join(words.split()) in text
        for part in (*info.files, *info.files.values(), info.title):
            assert part in text
        assert len(set(info.classes)) == len(info.classes)
    fars = FEDERATIONS["fars"].coder
    assert fars is not None
    assert {"RACE", "HISPANIC_ORIGIN"} <= set(fars.dropped)
    assert not any(name.startswith(("CASE_STATE", "INJURY")) for name in fars.names)
    shapes = {row.name: row.shape for row in list_datasets()}
    assert shapes["fars"] == (146,)
    assert shapes["heart"] == (41,)
    assert shapes["vietnam"] == (17,)
    assert shapes["spam"] == ()


def test_the_card_command(noisewise: Noisewise) -> None:
    code, out, _ = noisewise("data", "show", "heart")
    assert code == 0
    assert "leaks" in out
    assert "CC BY 4.0" in out
    code, out, _ = noisewise("data", "show", "digits")
    assert code == 0
    assert "1 x 8 x 8" in out
    code, _, err = noisewise("data", "show", "nothing")
    assert code == 2
    assert "must be one of digits" in err
    code, out, _ = noisewise("data", "list")
    assert code == 0
    assert "text" in out


# E-mails.


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"Subject: =?utf-8?q?caf=C3=A9?=\n\nx", "café\n\nx"),
        (b"Subject: =?klingon?q?x?=\n\nx", "=?klingon?q?x?=\n\nx"),
        (b"Subject: a\n b\n\nx", "a b\n\nx"),
        (b"X-Spam: yes\nReceived: from spam\n\nonly text\n", "only text"),
        (b"Content-Type: text/html\n\n<p>Buy <b>now</b></p>", "Buy now"),
        (b"Content-Type: text/plain; charset=klingon\n\n\xe9", "é"),
        (b"Content-Type: text/plain; charset=utf-8\n\n\xff", "\ufffd"),
        (b"Content-Transfer-Encoding: base64\n\naGVsbG8=", "hello"),
        (
            b'Content-Type: multipart/mixed; boundary="b"\nSubject: s\n\n--b\nContent-Type: '
            b"text/html\n\n<i>no</i>\n--b\nContent-Type: text/plain\n\nyes\n--b--\n",
            "s\n\nyes",
        ),
        (b"", ""),
    ],
)
def test_subject_and_text_of_a_mail(raw: bytes, text: str) -> None:
    assert mail_text(raw) == text


@given(st.binary(max_size=300), st.sampled_from([b"", b"Subject: ", b"Content-Type: text/html; "]))
def test_every_mail_gives_a_text(raw: bytes, start: bytes) -> None:
    assert isinstance(mail_text(start + raw), str)
