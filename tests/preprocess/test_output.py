"""What is counted, said and warned of while a dataset is written."""

import json
from collections import Counter

import numpy as np
import pytest

from hpclm.base.errors import ConfigError
from hpclm.data import tokenizers
from hpclm.preprocess.build import DatasetOutput, check_job
from hpclm.preprocess.chat import Chat
from hpclm.preprocess.counts import Counts, noted
from hpclm.preprocess.encode import END_OF_DOCUMENT, Column, Conversation, EncodeJob, _conversations
from tests.preprocess.texts import documents

CHAT = Chat("{{ x }}", (), 7)


def job(**more):
    return EncodeJob("bytes", (), **more)


def column(*texts, **more):
    """A document of one sequence for each text."""
    ids = np.frombuffer("".join(texts).encode("latin-1"), np.uint8).astype(np.uint16)
    sizes = np.array([len(text) for text in texts], np.int64)
    return Column(ids, sizes, np.ones(len(texts), np.int64), Counts(**more))


def piece(text, closes):
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.uint16)
    return Column(ids, np.array([ids.size]), np.array([1]), is_piece=True, closes=closes)


def test_pieces_are_one_document_that_ends_once(tmp_path):
    with DatasetOutput(tmp_path / "x", job(append_eod=True)) as output:
        for text, closes in (("ab", False), ("", False), ("c", False), ("", True), ("d", True), ("", True)):
            output.add(piece(text, closes))
        output.complete({})
    assert documents(tmp_path / "x") == [["abc|"], ["d|"]] and output.counts.skipped == 1


@pytest.mark.parametrize("append_eod", [True, False])
def test_an_empty_file_is_a_document_without_sequences_where_it_is_kept(append_eod, tmp_path):
    with DatasetOutput(tmp_path / "x", job(append_eod=append_eod, empty="keep")) as output:
        for text in ("", "a", ""):
            output.add(piece(text, True))
        output.complete({})
    assert documents(tmp_path / "x") == [[], ["a|" if append_eod else "a"], []] and output.counts.skipped == 0


def test_what_is_left_out_is_summed_over_all_chunks_and_noted(tmp_path, capsys):
    with DatasetOutput(tmp_path / "x", job(chat=CHAT)) as output:
        output.add(
            column(
                "a" * 2000,
                skipped=1,
                cut=2,
                dropped=1,
                endless=1,
                spanning=2,
                special=Counter(x=3),
                ends=Counter("aab"),
            )
        )
        output.add(
            column("b", skipped=1, cut=1, dropped=1, endless=2, spanning=1, special=Counter(x=1), ends=Counter("b"))
        )
        output.counts += Counts(unreadable=Counter({"not JSON": 1500, "no text": 1}))
        output.complete({"more": 1})
        output.describe("!")
    note = json.loads((tmp_path / "x.json").read_text())
    assert (note["documents"], note["tokens"], note["more"]) == (2, 2001, 1)
    assert note["counts"] == {
        **{
            "skipped": 2,
            "special": {"x": 4},
            "cut": 3,
            "dropped": 2,
            "endless": 3,
            "spanning": 3,
            "ends": {"a": 2, "b": 2},
        },
        "unreadable": {"no text": 1, "not JSON": 1500},
    }
    assert noted(note) == output.counts
    assert capsys.readouterr().out == (
        f"{tmp_path}/x.bin, .idx, .json: 2 documents, 2,001 tokens; 2 empty documents skipped, 3 conversations cut to 8 tokens, "
        "2 conversations dropped: too long, or nothing left to learn, 1,501 unreadable lines skipped (no text: 1, not JSON: 1,500)!\n"
    )


def test_what_nothing_is_left_out_of_says_only_its_counts(tmp_path, capsys):
    with DatasetOutput(tmp_path / "x", job()) as output:
        output.add(column("a"))
        output.complete({})
        output.describe()
    assert capsys.readouterr().out == f"{tmp_path}/x.bin, .idx, .json: 1 document, 1 token\n"
    assert json.loads((tmp_path / "x.json").read_text())["counts"] == {}


def test_inputs_without_documents_are_refused_with_what_was_left_out(tmp_path):
    with DatasetOutput(tmp_path / "x", job()) as output:
        with pytest.raises(ConfigError, match=r"no documents in a\.txt; no dataset was written"):
            output.refuse_empty("a.txt")
        output.add(column(skipped=3))
        with pytest.raises(ConfigError, match=r"no documents in a\.txt \(3 empty documents skipped\); no dataset"):
            output.refuse_empty("a.txt")


def warnings(caplog, tmp_path, columns, formats=frozenset({"jsonl"}), **more):
    caplog.clear()
    with DatasetOutput(tmp_path / "x", job(**more)) as output:
        for each in columns:
            output.add(each)
        output.warn(formats)
    return caplog.messages


@pytest.mark.parametrize(
    "count, size, warned", [(10, 31, True), (10, 32, False), (9, 31, False)], ids=["short", "long enough", "few"]
)
def test_documents_below_32_tokens_are_warned_of_where_there_are_ten(count, size, warned, caplog, tmp_path):
    said = warnings(caplog, tmp_path, [column("a" * size)] * count)
    assert len(said) == warned and all("has only 31.0 tokens on average" in one for one in said)


@pytest.mark.parametrize(
    "formats, way",
    [
        ({"files"}, "each file is a document; if the files are parts of one text, join them"),
        ({"lines", "files"}, "each line is a document; if the lines form one text, omit --format lines"),
        ({"jsonl", "files"}, "if consecutive ones belong together, join them into one document"),
    ],
)
def test_short_documents_are_joined_in_the_way_of_their_input(formats, way, caplog, tmp_path):
    [said] = warnings(caplog, tmp_path, [column("a")] * 10, formats)
    assert way in said
    assert not warnings(caplog, tmp_path, [column("a")] * 10, formats, layout="fairseq")


def test_a_tokenizer_that_hardly_divides_the_text_is_warned_of_above_16_bytes_a_token(caplog, tmp_path):
    assert not warnings(caplog, tmp_path, [column("ab", text_bytes=32)])
    [said] = warnings(caplog, tmp_path, [column("ab", text_bytes=33)])
    assert "tokens have 16 bytes of text on average (3 to 5 are usual): the bytes tokenizer" in said


@pytest.mark.parametrize(
    "name, said",
    [
        (END_OF_DOCUMENT, "It ends a document: training sees the end of a document there"),
        ("[UNK]", "It replaces text that the tokenizer does not know"),
        ("<|im_start|>", "It is a special token to the model, not text"),
    ],
)
def test_tokens_of_the_text_that_stand_for_no_text_are_counted_by_name(name, said, caplog, tmp_path):
    [one] = warnings(caplog, tmp_path, [column("ab", special=Counter({name: 1}))])
    assert f"the text has the token {name} once (50.0% of the tokens). {said}" in one
    [several] = warnings(caplog, tmp_path, [column("a" * 2500, special=Counter({name: 1234}))])
    assert f"the text has the token {name} 1,234 times (49.4%" in several


def test_line_ends_that_the_tokens_lose_are_counted(caplog, tmp_path):
    [said] = warnings(caplog, tmp_path, [column("ab", line_ends=1234)])
    assert "the tokens do not restore the 1,234 line ends of the text, because the bytes tokenizer turns them" in said


def test_conversations_that_do_not_teach_what_generation_asks_for_are_counted(caplog, tmp_path):
    ends, spans = warnings(caplog, tmp_path, [column("a", endless=2, spanning=1)], chat=CHAT)[::-1]
    assert "in 1 conversation one token spans the end of a prompt" in spans
    assert "in 2 conversations no end of a turn is learned" in ends and "{% generation %}" in ends
    dated = Chat("{{ strftime_now ('%d') }}", (), 7)
    [said] = warnings(caplog, tmp_path, [column("a")], chat=dated)
    assert "the chat template writes the date, so all conversations contain today's" in said


def test_conversations_need_a_tokenizer_with_special_tokens():
    check_job(job(append_eod=True))
    with pytest.raises(ConfigError, match=r"--chat needs a tokenizer\.json: the bytes tokenizer has no special tokens"):
        check_job(job(chat=CHAT))


class Ending:
    """A tokenizer that ends every text, or has no end."""

    size, eod, ends_itself = 9, 8, True
    fingerprint = {"kind": "ending", "files": {}, "size": 9, "eod": 8}  # noqa: RUF012

    def __init__(self, files):
        """It needs none."""

    def encode(self, text):
        return [1, 8]

    def encode_batch(self, texts):
        return tokenizers.flat([self.encode(text) for text in texts])

    def decode(self, ids):
        return ""


class Endless(Ending):
    eod, ends_itself = None, False


@pytest.mark.parametrize(
    "name, more, said",
    [
        ("Ending", {"append_eod": True}, "tokenizer ends every text by itself; leave out --append-eod"),
        ("Ending", {"language": "en"}, "tokenizer ends every text by itself; leave out --split-sentences"),
        (
            "Endless",
            {"append_eod": True},
            "has no end-of-document token; name one with --eod, or leave out --append-eod",
        ),
    ],
)
def test_ends_are_appended_where_the_tokenizer_has_one_and_does_not_itself(name, more, said):
    named = EncodeJob(f"{__name__}:{name}", ())
    check_job(named)
    with pytest.raises(ConfigError, match=said):
        check_job(EncodeJob(named.tokenizer, (), **more))


def conversation(size, *counted, **more):
    counts = np.zeros(size, np.bool_)
    counts[list(counted)] = True
    return Conversation(np.arange(size), counts, **{"spanning": False, "ends": frozenset("e"), **more})


@pytest.mark.parametrize("too_long, sizes, cut, dropped", [("cut", [8, 8], 2, 2), ("drop", [8], 0, 3)])
def test_conversations_longer_than_a_sample_are_cut_or_dropped_and_those_without_an_answer_dropped(
    too_long, sizes, cut, dropped
):
    chat = Chat("{{ x }}", (), 7, too_long)
    none, late = conversation(5, 0), conversation(9, 8)  # only the first token counts; only one that is cut off
    given = [[conversation(8, 3)], [], [conversation(9, 1), none], [late]]
    tokens, counts = _conversations(given, job(chat=chat), chat)
    assert tokens.sizes.tolist() == counts.sizes.tolist() == sizes and tokens.documents.tolist() == [1] * len(sizes)
    assert (tokens.counts.cut, tokens.counts.dropped) == (cut, dropped)
    assert counts.tokens[:8].tolist() == [0, 0, 0, 1, 0, 0, 0, 0] and (tokens.tokens.dtype, counts.tokens.dtype) == (
        np.uint16,
        np.uint8,
    )


def test_conversations_without_an_end_and_with_spanning_tokens_are_counted():
    given = [
        [conversation(4, 1, ends=frozenset())],
        [conversation(4, 1, spanning=True, ends=frozenset("f")), conversation(4, 1)],
    ]
    tokens, _ = _conversations(given, job(chat=CHAT), CHAT)
    assert (tokens.counts.endless, tokens.counts.spanning, tokens.counts.ends) == (1, 1, {"e": 1, "f": 1})
