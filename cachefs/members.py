"""Who takes part in the saves of a mount: this node's name, the members that must report, and the one that owns.

Pure: the launcher's variables and the host's name are handed in. Sources of the facts: srun(1) for SLURM_*, the page
"torchrun (Elastic Launch)" for GROUP_*, Kubernetes "Indexed Job" for JOB_COMPLETION_INDEX, Slurm::Hostlist(3pm) for
host lists. RANK and WORLD_SIZE are not read: they count processes, and a member is a node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Final, Literal

import msgspec

from cachefs.errors import InvalidError

Owner = Literal["auto", "yes", "no", "service"]

MOST: Final = 100_000
"""Most members of a run; the parallelism of a Kubernetes indexed Job has the same limit."""
_ITEM: Final = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_RANGE: Final = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_INDEXES: Final = (
    ("GROUP_RANK", "GROUP_WORLD_SIZE"),
    ("NODE_RANK", "NNODES"),
    ("JOB_COMPLETION_INDEX", ""),  # Kubernetes tells a pod its index, not how many there are
)
_LIST_HINT: Final = "give the names of all members as a list: members = node-a,node-b"
_OWNER_HINT: Final = "give --owner yes on exactly one node, and --owner no on all others"


class Members(msgspec.Struct, frozen=True):
    """`name`: this node. `names`: all members in order, empty when only their number is known. `count`: how many must
    report. `owner`: whether this daemon opens attempts, seals and promotes. `service`: it is an owner that is no
    member, and never reports.
    """

    name: str
    names: tuple[str, ...]
    count: int
    owner: bool
    service: bool = False

    def declared(self, members: Sequence[str]) -> bool:
        """Return whether an attempt that declares these members, none for any, waits for a report of this one."""
        return not self.service and (not members or self.name in members)


class _Launched(msgspec.Struct, frozen=True):
    """What the launcher says. `source` is the variable it was read from; `count` 0 means that it says nothing."""

    source: str
    index: int
    count: int
    names: tuple[str, ...] = ()


def resolve(member: str | None, members: str | None, owner: Owner, env: Mapping[str, str], hostname: str) -> Members:
    """Return the membership of this node.

    `member` is its name when it was given explicitly. `members` is None for this node alone, a number, a list of names
    (a host list like `gpu[01-04]` is one), or `auto` for what the launcher's variables in `env` say. Raises
    InvalidError when they do not fit together, or leave open who the owner is.
    """
    name = member or hostname
    if owner == "service":
        return _service(name, members)
    if members is None or (members == "1" and owner == "auto"):
        return Members(name, (name,), 1, owner != "no")
    if not members.isdecimal() and members != "auto":
        return _listed(expand(members), member, owner, hostname)
    wanted = _count(members, "members") if members.isdecimal() else 0
    launched = _launched(env, hostname)
    if launched is None and not wanted:
        raise InvalidError(
            "members = auto, but no launcher says who they are (neither SLURM_JOB_NODELIST, nor GROUP_RANK with "
            "GROUP_WORLD_SIZE, nor NODE_RANK with NNODES is set)",
            hint=f"{_LIST_HINT}; or, for one node, leave members out",
        )
    if launched is not None:
        return _indexed(launched, wanted, member, owner)
    if owner == "auto":
        raise InvalidError(f"members = {members}, but nothing says which of them this node is", hint=_OWNER_HINT)
    if owner == "yes" and member is None:  # a service that took itself for a member would count as one
        raise InvalidError(
            f"members = {members} and owner = yes, but nothing says whether this node is one of the {members}",
            hint="give --member NAME if it is; --owner service if it is not, and only publishes what the others save",
        )
    return Members(name, (), wanted, owner == "yes")


def read_back(member: str, members: str | None, owner: Owner) -> Members:
    """Return the membership that `canonical` wrote down. Raises InvalidError for settings that are not resolved."""
    if members == "auto" or (members and owner == "auto"):
        raise InvalidError("members are not resolved", hint="use the configuration that load() returns")
    return resolve(member, members, owner, {}, member)


def canonical(found: Members) -> tuple[str, str | None, Owner]:
    """Return `member`, `members` and `owner` that say the same without the launcher's variables."""
    alone = found.names == (found.name,)
    members = None if alone else ",".join(found.names) or str(found.count)
    return found.name, members, "service" if found.service else "yes" if found.owner else "no"


def _service(name: str, members: str | None) -> Members:
    if members in (None, "auto", "1"):
        raise InvalidError(
            "owner = service, but nothing says who the members are",
            hint="give their names, members = node-a,node-b, or as many as there are, members = N, as on their nodes",
        )
    names = () if members.isdecimal() else expand(members)
    if name in names:
        raise InvalidError(
            f"owner = service, but this node, {name}, is one of the members {_some(names)}",
            hint="give the service another name with --member; a member that owns the runs needs --owner yes",
        )
    return Members(name, names, len(names) or _count(members, "members"), owner=True, service=True)


def _listed(names: tuple[str, ...], member: str | None, owner: Owner, hostname: str) -> Members:
    found = member if member in names else _named(names, hostname) if member is None else None
    if found is None and owner != "yes":
        raise InvalidError(
            f"this node, {member or hostname}, is not one of the members {_some(names)}",
            hint="give its name among them with --member; a node that only owns the runs needs --owner service",
        )
    name = found or member or hostname
    owns = name == names[0] if owner == "auto" else owner == "yes"
    return Members(name, names, len(names), owns, service=found is None)


def _indexed(launched: _Launched, wanted: int, member: str | None, owner: Owner) -> Members:
    count = launched.count or wanted
    if not count:
        raise InvalidError(
            f"{launched.source} says which member this node is, but nothing says how many there are",
            hint="give their number: members = N, or CACHEFS_MEMBERS=N",
        )
    if wanted not in (0, count):
        raise InvalidError(f"members = {wanted}, but {launched.source} speaks of {count}", hint=_LIST_HINT)
    if launched.index >= count:
        raise InvalidError(
            f"{launched.source} says that this node has index {launched.index}, but there are {count} members",
            hint="indexes count from 0; members is the number of nodes",
        )
    names = launched.names or tuple(f"node-{number}" for number in range(count))
    name = member or names[launched.index]
    # What the others call themselves is known only when this node is called as the launcher would call it.
    known = names if name == names[launched.index] else ()
    return Members(name, known, count, launched.index == 0 if owner == "auto" else owner == "yes")


def _launched(env: Mapping[str, str], hostname: str) -> _Launched | None:
    for source in ("SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if env.get(source):
            return _slurm(source, env, hostname)
    for index, count in _INDEXES:
        if env.get(index) and (not count or env.get(count)):
            return _Launched(index, _number(env[index], index), _count(env[count], count) if count else 0)
    return None


def _slurm(source: str, env: Mapping[str, str], hostname: str) -> _Launched:
    if env.get("SLURM_HET_SIZE", "1") != "1":
        raise InvalidError(
            f"a heterogeneous job: {source} names the nodes of one of its {env['SLURM_HET_SIZE']} components only",
            hint=_LIST_HINT,
        )
    try:
        names = expand(env[source])
    except InvalidError as error:
        raise InvalidError(f"{source}: {error}", hint=_LIST_HINT) from error
    found = _named(names, hostname)
    if found is not None:
        # Before SLURM_NODEID: a step on some of the nodes counts its own ones, and ssh passes on the number of another.
        return _Launched(source, names.index(found), len(names), names)
    if not env.get("SLURM_NODEID"):
        raise InvalidError(
            f"this node, {hostname}, is not one of those in {source}: {_some(names)}",
            hint="start the daemon inside the job, or " + _LIST_HINT,
        )
    return _Launched(source, _number(env["SLURM_NODEID"], "SLURM_NODEID"), len(names), names)


def _named(names: Sequence[str], hostname: str) -> str | None:
    """Return the only name that means this host: the same one, or the same up to the first dot."""
    if hostname in names:
        return hostname
    short = [name for name in names if name.partition(".")[0] == hostname.partition(".")[0]]
    return short[0] if len(short) == 1 else None


def expand(text: str) -> tuple[str, ...]:
    """Return the names of a host list such as `gpu[01-03,07],login1`, in order; the last bracket counts fastest.

    A range has the digits of its lower bound, as in Slurm: `[08-10]` is 08, 09, 10. Raises InvalidError for any other
    text, for a name that occurs twice, and for more than MOST names.
    """
    items = _ITEM.findall(text)
    if not items or ",".join(items) != text:
        raise InvalidError(f"{text!r} is not a list of names", hint=_LIST_HINT)
    names: list[str] = []
    for item in items:
        names += _expanded(item.strip(), MOST - len(names))
    for name in names:
        check_name(name)
    if len(set(names)) != len(names):
        raise InvalidError(f"{text!r} names a member twice")
    return tuple(names)


def _expanded(item: str, most: int) -> list[str]:
    parts = re.split(r"\[([^\]]*)\]", item)
    choices: list[list[str]] = []
    total = 1
    for position, part in enumerate(parts):
        choices.append(_numbers(part, most) if position % 2 else [part])
        total *= len(choices[-1])
        if total > most:
            raise InvalidError(f"{item!r} is more than {MOST} members")
    return ["".join(chosen) for chosen in product(*choices)]


def _numbers(ranges: str, most: int) -> list[str]:
    found: list[str] = []
    for one in ranges.split(","):
        match = _RANGE.fullmatch(one)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or high < low:
            raise InvalidError(f"{one!r} is not a number or a range of numbers", hint=_LIST_HINT)
        if high - low >= most - len(found):
            raise InvalidError(f"[{ranges}] is more than {MOST} members")
        found += [str(number).zfill(len(match[1])) for number in range(low, high + 1)]
    return found


def check_name(name: str) -> None:
    """Raise InvalidError unless `name` can be a member's: it becomes a part of object keys."""
    if "/" in name or not name.strip() or not name.isprintable() or len(name.encode()) > 128:
        raise InvalidError("must be 1 to 128 bytes of printable text without '/'")


def check_members(members: str) -> None:
    """Raise InvalidError unless `members` is `auto`, a number, or a list of names."""
    if members.isdecimal():
        _count(members, "members")
    elif members != "auto":
        expand(members)


def _count(text: str, what: str) -> int:
    number = _number(text, what)
    if not 1 <= number <= MOST:
        raise InvalidError(f"{what} must be a number from 1 to {MOST}", hint=_LIST_HINT)
    return number


def _number(text: str, what: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise InvalidError(f"{what} = {text!r} is not a number", hint=_LIST_HINT)
    return int(text)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
