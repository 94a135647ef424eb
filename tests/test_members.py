"""members.py: who takes part in a save, as settings and launchers say it."""

from __future__ import annotations

import re
from itertools import combinations

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from cachefs.errors import InvalidError
from cachefs.members import MOST, Members, canonical, expand, read_back, resolve

SLURM = {"SLURM_JOB_NODELIST": "gpu[01-03,07],login1", "SLURM_NODEID": "3"}
NODES = ("gpu01", "gpu02", "gpu03", "gpu07", "login1")


def found(members=None, *, member=None, owner="auto", host="gpu07.cluster", **env):
    return resolve(member, members, owner, env, host)


def test_a_node_alone_is_its_only_member_and_owner():
    assert found() == found("1") == Members("gpu07.cluster", ("gpu07.cluster",), 1, owner=True)
    assert found(member="me") == Members("me", ("me",), 1, owner=True)
    assert found(**SLURM) == found()  # a launcher alone makes no members: it has to be asked for
    assert not found(owner="no").owner


def test_a_list_finds_this_node_by_its_whole_or_short_name():
    assert found("a,gpu07,b") == Members("gpu07", ("a", "gpu07", "b"), 3, owner=False)
    assert found("gpu07.cluster, b") == Members("gpu07.cluster", ("gpu07.cluster", "b"), 2, owner=True)
    assert found("gpu[06-07]") == Members("gpu07", ("gpu06", "gpu07"), 2, owner=False)
    assert found("x,y", member="y", owner="yes") == Members("y", ("x", "y"), 2, owner=True)


def test_an_owner_need_not_be_a_member():
    assert found("a,b", owner="yes") == Members("gpu07.cluster", ("a", "b"), 2, owner=True, service=True)
    assert found("a,b", owner="service") == found("a,b", owner="yes")
    assert found("a", owner="yes", member="p") == Members("p", ("a",), 1, owner=True, service=True)
    assert found("3", owner="service") == Members("gpu07.cluster", (), 3, owner=True, service=True)
    assert found("3", owner="service", JOB_COMPLETION_INDEX="1") == found("3", owner="service"), "a pod beside the job"


@pytest.mark.parametrize("members", [None, "1", "auto", "a,gpu07.cluster"])
def test_a_service_is_told_who_the_members_are_and_is_none_of_them(members):
    with pytest.raises(InvalidError, match="owner = service, but"):
        found(members, owner="service")


@pytest.mark.parametrize("host", ["gpu07", "gpu07.cluster"])
def test_slurm_names_this_node_by_its_host(host):
    assert found("auto", host=host, **SLURM) == Members("gpu07", NODES, 5, owner=False)


def test_slurm_names_this_node_by_its_number_where_the_host_has_another_name():
    assert found("auto", host="container", **SLURM) == Members("gpu07", NODES, 5, owner=False)
    assert found("auto", host="container", **SLURM | {"SLURM_NODEID": "0"}) == Members("gpu01", NODES, 5, owner=True)
    old = {"SLURM_NODELIST": "n[1-2]", "SLURM_NODEID": "1"}
    assert found("auto", host="container", **old) == Members("n2", ("n1", "n2"), 2, owner=False)


def test_slurm_numbers_of_a_step_do_not_make_two_nodes_one_member():
    # `srun --nodelist=gpu07` inside the job: its only node has the number 0.
    assert found("auto", host="gpu07", **SLURM | {"SLURM_NODEID": "0"}).name == "gpu07"


@pytest.mark.parametrize(
    ("env", "members"),
    [
        ({"GROUP_RANK": "2", "GROUP_WORLD_SIZE": "4"}, "auto"),
        ({"NODE_RANK": "2", "NNODES": "4"}, "auto"),
        ({"NODE_RANK": "2", "NNODES": "4"}, "4"),
        ({"JOB_COMPLETION_INDEX": "2"}, "4"),
        ({"JOB_COMPLETION_INDEX": "2", "RANK": "17", "WORLD_SIZE": "32"}, "4"),
    ],
)
def test_an_index_names_the_nodes(env, members):
    names = ("node-0", "node-1", "node-2", "node-3")
    assert found(members, **env) == Members("node-2", names, 4, owner=False)
    assert found(members, owner="yes", **env).owner
    # Who is called otherwise here may be called otherwise elsewhere: then only the number is known.
    assert found(members, member="me", **env) == Members("me", (), 4, owner=False)
    assert found(members, member="node-2", **env).names == names
    first = {name: "0" if name in ("GROUP_RANK", "NODE_RANK", "JOB_COMPLETION_INDEX") else env[name] for name in env}
    assert found(members, **first).owner


def test_slurm_is_asked_first_and_torchrun_before_kubernetes():
    env = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2", "JOB_COMPLETION_INDEX": "1"}
    assert found("auto", **SLURM, **env).names == NODES
    assert found("auto", **env).name == "node-0"


def test_a_number_alone_needs_to_be_told_the_owner():
    assert found("3", owner="yes", member="me") == Members("me", (), 3, owner=True)
    assert found("3", owner="no", member="me") == Members("me", (), 3, owner=False)
    with pytest.raises(InvalidError, match="nothing says which of them this node is") as caught:
        found("3")
    assert caught.value.hint == "give --owner yes on exactly one node, and --owner no on all others"


def test_an_owner_of_a_number_of_members_says_whether_it_is_one():
    """A service that took itself for a member would say that it has nothing, and be counted in a member's place."""
    with pytest.raises(InvalidError, match="nothing says whether this node is one of the 3") as caught:
        found("3", owner="yes")
    assert "--owner service" in caught.value.hint


@pytest.mark.parametrize(
    ("members", "env", "message"),
    [
        ("a,b", {}, "this node, gpu07.cluster, is not one of the members a, b"),
        ("a,b,c,d,e,f", {}, "is not one of the members a, b, c, d, ..."),
        ("gpu07.one,gpu07.two", {}, "this node, gpu07.cluster, is not one of the members"),  # which of them, is open
        ("auto", {}, "no launcher says who they are"),
        ("auto", {"RANK": "0", "WORLD_SIZE": "8"}, "no launcher says who they are"),
        ("auto", {"JOB_COMPLETION_INDEX": "1"}, "JOB_COMPLETION_INDEX says which member this node is, but nothing"),
        ("2", {"JOB_COMPLETION_INDEX": "2"}, "this node has index 2, but there are 2 members"),
        ("2", {"NODE_RANK": "0", "NNODES": "4"}, "members = 2, but NODE_RANK speaks of 4"),
        ("2", SLURM, "members = 2, but SLURM_JOB_NODELIST speaks of 5"),
        ("auto", {"NODE_RANK": "0", "NNODES": "1:4"}, "NNODES = '1:4' is not a number"),
        ("auto", {"NODE_RANK": "-1", "NNODES": "4"}, "NODE_RANK = '-1' is not a number"),
        ("auto", {"NODE_RANK": "0", "NNODES": "0"}, "NNODES must be a number from 1 to 100000"),
        ("auto", {"SLURM_JOB_NODELIST": "n[1-2]"}, "this node, gpu07.cluster, is not one of those in SLURM_JOB_NODEL"),
        ("auto", {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NODEID": "2"}, "has index 2, but there are 2 members"),
        ("auto", {"SLURM_JOB_NODELIST": "bgl[123x456]"}, "SLURM_JOB_NODELIST: '123x456' is not a number or a range"),
        ("auto", SLURM | {"SLURM_HET_SIZE": "2"}, "names the nodes of one of its 2 components only"),
    ],
)
def test_what_does_not_fit_together_is_refused(members, env, message):
    with pytest.raises(InvalidError, match=re.escape(message)) as caught:
        found(members, **env)
    assert caught.value.hint


NAMES = st.text("abz09.-_", min_size=1, max_size=5)
ENVS = st.fixed_dictionaries(
    {},
    optional={
        "SLURM_JOB_NODELIST": st.sampled_from(["n[1-3]", "7", "[1-2]", "solo"]),
        "SLURM_NODEID": st.sampled_from(["0", "1"]),
        "NODE_RANK": st.sampled_from(["0", "1"]),
        "NNODES": st.sampled_from(["1", "2"]),
        "JOB_COMPLETION_INDEX": st.sampled_from(["0", "1"]),
    },
)


@given(
    member=st.none() | NAMES,
    members=st.none() | st.sampled_from(["auto", "1", "2", "n1,n2", "solo"]) | NAMES,
    owner=st.sampled_from(["auto", "yes", "no", "service"]),
    env=ENVS,
    host=st.sampled_from(["n1", "n2", "solo", "7", "2.domain"]),
)
def test_what_was_resolved_is_written_down_without_the_environment(member, members, owner, env, host):
    try:
        resolved = resolve(member, members, owner, env, host)
    except InvalidError:
        assume(False)
    written = canonical(resolved)
    assert read_back(*written) == resolved
    assert canonical(read_back(*written)) == written
    assert not resolved.names or len(resolved.names) == resolved.count


@given(st.integers(1, 6), st.data())
def test_the_nodes_of_a_job_agree(count, data):
    """Each node by itself finds another member, all find the same ones, and exactly one owner."""
    names = [f"n{number}" for number in range(count)]
    way = data.draw(st.sampled_from(["list", "slurm", "index"]))
    nodes = []
    for number, name in enumerate(names):
        if way == "list":
            nodes.append(resolve(None, ",".join(names), "auto", {}, f"{name}.cluster"))
        elif way == "slurm":
            env = {"SLURM_JOB_NODELIST": f"n[0-{count - 1}]", "SLURM_NODEID": str(number)}
            nodes.append(resolve(None, "auto", "auto", env, data.draw(st.sampled_from([name, "container"]))))
        else:
            env = {"JOB_COMPLETION_INDEX": str(number)}
            assume(count > 1)  # one of one is called as its host
            nodes.append(resolve(None, str(count), "auto", env, "pod"))
    assert sorted(node.name for node in nodes) == sorted(nodes[0].names)
    assert len({(node.names, node.count) for node in nodes}) == 1
    assert [node.owner for node in nodes] == [True] + [False] * (count - 1)


# Host lists.


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu[01-03,07],login1", NODES),
        ("a[1-2]b[3-4]", ("a1b3", "a1b4", "a2b3", "a2b4")),
        ("[08-11]", ("08", "09", "10", "11")),
        ("n[98-101]x", ("n98x", "n99x", "n100x", "n101x")),
        ("n[098-101]", ("n098", "n099", "n100", "n101")),
        ("n-1.b, n_2", ("n-1.b", "n_2")),
    ],
)
def test_host_lists(text, names):
    assert expand(text) == names


@pytest.mark.parametrize(
    "text",
    ["", ",", "a,,b", "a,", "n[", "n]", "n[1", "n[[1]]", "n[]", "n[1-]", "n[2-1]", "n[1,]", "n[a]", "n[1-2-3]",
     "n[1:3]", "n[ 1]", "n[\u0661]", "a/b", "a,a", "n[1-2],n1", " ", f"n[1-{MOST + 1}]", "n[0-999][0-999]",
     "n[1-99999999999999999999]", "a\tb"],
)  # fmt: skip
def test_other_texts_are_no_host_lists(text):
    with pytest.raises(InvalidError):
        expand(text)


def test_the_most_members():
    assert len(expand(f"n[1-{MOST}]")) == MOST


PREFIXES = st.text("abc-", min_size=1, max_size=3).map(lambda text: text + "-")


@st.composite
def groups(draw):
    """Return names with a common prefix, and the compact form that Slurm gives them."""
    prefix, width = draw(PREFIXES), draw(st.integers(1, 4))
    numbers = sorted(draw(st.sets(st.integers(0, 999), min_size=1, max_size=12)))
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1 and len(str(number)) == len(str(runs[-1][0])):
            runs[-1].append(number)
        else:
            runs.append([number])
    ranges = ",".join(
        f"{run[0]:0{width}}" if len(run) == 1 else f"{run[0]:0{width}}-{run[-1]:0{width}}" for run in runs
    )
    return [f"{prefix}{number:0{width}}" for number in numbers], f"{prefix}[{ranges}]"


@given(st.lists(groups(), min_size=1, max_size=4))
def test_compact_lists_expand_to_the_names_they_were_made_of(made):
    names = [name for group, _ in made for name in group]
    assume(len(set(names)) == len(names))
    assert expand(",".join(text for _, text in made)) == tuple(names)


@given(st.text("n[]0123456789-, x", max_size=30))
@example("n[0-9]" * 6)
def test_any_text_is_refused_or_makes_different_sound_names(text):
    try:
        names = expand(text)
    except InvalidError:
        return
    assert names
    assert all(first != second for first, second in combinations(names[:50], 2))
    assert not any(set(name) & set("[],/") for name in names)
