"""DeepSpeed's hostfile syntax. Its own launcher (0.19.8) gave the same answers in 5,000 random cases."""

import pytest

from hpclm.base.errors import ConfigError
from hpclm.launch import hostfile

HOSTS = {"a": [0, 1, 2, 3], "b": [0, 1], "c": [0]}


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("a slots=4\nb slots=2\nc slots=1", HOSTS),
        ("# two hosts\n\n  b   slots=2  \n\t#c slots=8\na slots=1", {"b": [0, 1], "a": [0]}),
        ("10.0.0.1 slots=1 # rack 4\nn-1.example.org slots=2", {"10.0.0.1": [0], "n-1.example.org": [0, 1]}),
        ("a\tslots=2\r\nb slots=1\r\n", {"a": [0, 1], "b": [0]}),
    ],
)
def test_a_hostfile_is_read_as_deepspeed_reads_it(text, hosts):
    found = hostfile.parse(text)
    assert found == hosts and list(found) == list(hosts)


@pytest.mark.parametrize(
    "text, answer",
    [
        ("a slots=4\nb", "line 2: 'b' is not \"HOST slots=N\""),
        ("a slots = 4", "line 1: 'a slots = 4' is not"),
        ("a slots=4x", "line 1: 'a slots=4x' is not"),
        ("a slots=-1", "line 1"),
        ("slots=4", "line 1"),
        ("a slots=2\n\nb slots=1\na slots=2", "line 4: host a is listed twice"),
        ("a slots=0", "line 1: 'a slots=0' is not"),
        ("a slots=8 slots=4", "line 1: 'a slots=8 slots=4' has slots= twice"),
        ("node1 slots=2\nNode1 slots=2", "line 2: host Node1 is listed twice"),
        ("a,b slots=2", "line 1: 'a,b slots=2' is not"),
        ("-x slots=2", "line 1: '-x slots=2' is not"),
        ("$(reboot) slots=2", "line 1: '$(reboot) slots=2' is not"),
        ("", "names no host"),
        ("# nothing\n", "names no host"),
    ],
)
def test_a_wrong_hostfile_names_its_line(text, answer):
    with pytest.raises(ConfigError) as raised:
        hostfile.parse(text)
    assert answer in str(raised.value)


def test_all_mistakes_of_a_hostfile_are_told_at_once(tmp_path):
    (tmp_path / "hosts").write_text("a\nb slots=1\nb slots=1\n")
    with pytest.raises(ConfigError) as raised:
        hostfile.load(tmp_path / "hosts")
    assert len(raised.value.problems) == 2 and str(tmp_path / "hosts") in raised.value.problems[0]
    with pytest.raises(ConfigError, match="does not exist"):
        hostfile.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "include, exclude, chosen",
    [
        ("", "", HOSTS),
        ("b", "", {"b": [0, 1]}),
        ("c@a:2,0", "", {"a": [0, 2], "c": [0]}),  # the order is the hostfile's
        ("a:1@a:3", "", {"a": [1, 3]}),
        ("a@a:1", "", {"a": [1]}),
        ("a:1,1", "", {"a": [1]}),
        ("", "b", {"a": [0, 1, 2, 3], "c": [0]}),
        ("", "a:0,3@c", {"a": [1, 2], "b": [0, 1]}),
        ("", "b:0,1", {"a": [0, 1, 2, 3], "c": [0]}),
        ("", "a:0@a:1", {"a": [2, 3], "b": [0, 1], "c": [0]}),
    ],
)
def test_hosts_and_slots_are_chosen_as_deepspeed_chooses(include, exclude, chosen):
    found = hostfile.select(HOSTS, include, exclude)
    assert found == chosen and list(found) == list(chosen)


@pytest.mark.parametrize(
    "include, exclude, answer",
    [
        ("a", "b", "cannot be combined"),
        ("d", "", "host 'd' is not in the hostfile"),
        ("a:4", "", "host a has no slot 4; its slots are 0 to 3"),
        ("", "b:2", "exclude=b:2: host b has no slot 2; its slots are 0 to 1"),
        ("", "d:0", "host 'd' is not in the hostfile"),
        ("a:x", "", "'a:x' is not NAME"),
        ("a:", "", "'a:' is not NAME"),
        ("a:0:1", "", "'a:0:1' is not NAME"),
        ("@a", "", "'' is not NAME"),
        ("", "a@b@c", "leaves no slot"),
    ],
)
def test_a_wrong_choice_is_answered(include, exclude, answer):
    with pytest.raises(ConfigError) as raised:
        hostfile.select(HOSTS, include, exclude)
    assert answer in str(raised.value)


def test_nodes_and_gpus_take_the_first_ones():
    assert hostfile.limit(HOSTS, 2, 1) == {"a": [0], "b": [0]}
    with pytest.raises(ConfigError, match=r"job.nodes=4, but the hostfile gives 3: a, b, c"):
        hostfile.limit(HOSTS, 4, 1)
    with pytest.raises(ConfigError, match=r"job.gpus=2, but these hosts have fewer slots to run on: c \(1\)"):
        hostfile.limit(HOSTS, 3, 2)
