"""config/: where a value comes from, and what is refused in which words."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st

from cachefs import link
from cachefs.config.load import given, load
from cachefs.config.schema import KEYS, Config, table
from cachefs.config.values import GIB, MIB, Location
from cachefs.errors import InvalidError
from cachefs.members import Members

FLAGS = {"mountpoint": "/mnt/ckpt", "store": "file:///data/store", "staging": "/nvme/staging"}


@pytest.fixture
def toml(tmp_path):
    def write(text: str) -> Path:
        file = tmp_path / "job.toml"
        file.write_text(text)
        return file

    return write


def test_defaults():
    made = load(None, {}, FLAGS)
    places = {"mountpoint": Path("/mnt/ckpt"), "store": "file:///data/store", "staging": Path("/nvme/staging")}
    assert made == Config(**places, owner="yes")
    assert (made.publish, made.presets, made.part_size, made.test_level) == (True, ("auto",), 64 * MIB, "bytes")
    assert (made.member, made.allow_other) == (os.uname().nodename, os.geteuid() == 0)
    assert made.metrics_address == ("127.0.0.1", 9464)


def test_flags_win_over_environment_and_environment_over_file(toml):
    file = toml('run = "file"\nregion = "file"\nquiet = 1\n')
    env = {"CACHEFS_RUN": "env", "CACHEFS_REGION": "env"}
    made = load(file, env, FLAGS | {"run": "flag"})
    assert (made.run, made.region, made.quiet) == ("flag", "env", 1.0)


def test_a_flag_of_none_and_an_empty_variable_are_not_given(toml):
    made = load(toml('run = "file"\n'), {"CACHEFS_RUN": ""}, FLAGS | {"run": None})
    assert made.run == "file"


def test_every_key_is_reachable_by_its_variable():
    raw = {
        "mountpoint": "/m", "store": "s3://bucket", "staging": "/s", "endpoint_url": "http://[::1]:9000", "region": "r",
        "run": "a/b", "member": "n", "members": "n,[1-3]", "owner": "no",
        "publish": "false", "presets": "dcp, hf", "metrics": "off", "allow_other": "false",
        "data_path": "python", "upload_concurrency": "3", "part_size": "8MiB", "bandwidth": "1GB",
        "test_level": "load", "load_command": "check --all", "load_timeout": "5m", "load_user": "nobody",
        "drain_timeout": "2m",
        "close_deadline": "1h", "settle": "0", "quiet": "250ms", "loose": "false", "loose_interval": "5",
        "early_upload_delay": "1.5", "reserve": "2GB", "full_timeout": "1m",
        "pointer_poll": "3s", "member_settle": "2s", "member_deadline": "30m",
        "gc": "true", "gc_interval": "10m", "gc_grace": "2d", "keep_last": "5", "keep_hourly": "0", "keep_daily": "30",
        "probe_interval": "5m", "log_level": "debug", "log_format": "json",
    }  # fmt: skip
    made = load(None, {KEYS[name].env: value for name, value in raw.items()}, {})
    assert msgspec.structs.asdict(made) == {
        "mountpoint": Path("/m"), "store": "s3://bucket", "staging": Path("/s"), "endpoint_url": "http://[::1]:9000",
        "region": "r", "run": "a/b", "member": "n", "members": "n,1,2,3", "owner": "no", "publish": False,
        "presets": ("dcp", "hf"), "preset": (),
        "metrics": "off", "data_path": "python", "allow_other": False, "upload_concurrency": 3,
        "part_size": 8 * MIB, "bandwidth": 10**9,
        "test_level": "load", "load_command": "check --all", "load_timeout": 300.0, "load_user": "nobody",
        "drain_timeout": 120.0, "close_deadline": 3600.0, "settle": 0.0, "quiet": 0.25, "loose": False,
        "loose_interval": 5.0, "early_upload_delay": 1.5, "reserve": 2 * 10**9,
        "full_timeout": 60.0, "pointer_poll": 3.0, "member_settle": 2.0, "member_deadline": 1800.0,
        "gc": True, "gc_interval": 600.0, "gc_grace": 172800.0, "keep_last": 5, "keep_hourly": 0, "keep_daily": 30,
        "probe_interval": 300.0, "log_level": "debug", "log_format": "json",
    }  # fmt: skip
    assert set(raw) == set(KEYS) - {"preset"}
    assert made.metrics_address is None


def test_members_of_the_launcher_are_written_down_and_survive_the_way_to_the_engine(toml):
    env = {"SLURM_JOB_NODELIST": "gpu[01-03]", "SLURM_NODEID": "1"}
    made = load(toml('members = "auto"\n'), env, FLAGS)
    assert (made.member, made.members, made.owner) == ("gpu02", "gpu01,gpu02,gpu03", "no")
    assert link.unpacked(link.packed(made)) == made
    assert made.membership == Members("gpu02", ("gpu01", "gpu02", "gpu03"), 3, owner=False)
    assert load(None, {}, FLAGS | {"member": "me"}).membership == Members("me", ("me",), 1, owner=True)
    assert load(toml("members = 3\n"), {}, FLAGS | {"member": "me", "owner": "yes"}).membership == Members(
        "me", (), 3, owner=True
    )


def test_members_that_were_not_resolved_are_no_membership():
    unresolved = msgspec.structs.replace(load(None, {}, FLAGS), members="auto")
    with pytest.raises(InvalidError, match="not resolved"):
        assert unresolved.membership


def test_user_presets_stay_raw_tables(toml):
    made = load(toml('[[preset]]\nname = "mine"\nmax = 3\n[[preset]]\nname = "other"\n'), {}, FLAGS)
    assert made.preset == ({"name": "mine", "max": 3}, {"name": "other"})


def test_relative_paths_of_a_file_start_at_the_file_and_others_at_the_current_directory(toml, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    made = load(toml('mountpoint = "m"\n'), {"CACHEFS_STAGING": "s/../t"}, {"store": "s3://bucket"})
    assert (made.mountpoint, made.staging) == (tmp_path / "m", tmp_path / "elsewhere" / "t")


@pytest.mark.parametrize(
    ("store", "location"),
    [
        ("file:///data/my store%20", Location(scheme="file", path=Path("/data/my store%20"))),
        ("s3://bucket", Location(scheme="s3", bucket="bucket")),
        ("s3://bucket/", Location(scheme="s3", bucket="bucket")),
        ("s3://bucket/team/ckpt/", Location(scheme="s3", bucket="bucket", prefix="team/ckpt")),
    ],
)
def test_store_locations(store, location):
    assert load(None, {}, FLAGS | {"store": store}).location == location


@for_all(st.integers(0, 10**6), st.sampled_from([("KiB", 1024), ("MB", 10**6), ("g", GIB), ("TiB", 1024**4), ("", 1)]))
def test_sizes_with_units_are_exact(number, unit):
    assert given(None, {"CACHEFS_RESERVE": f"{number} {unit[0]}"}, {}) == {"reserve": number * unit[1]}


# What is refused, and in which words: the key, the value, where it came from, and what would be right.

BAD_FLAGS = [
    ("part_size", "4MiB", "part_size = '4MiB' (from --part-size): must be at least 5MiB"),
    ("part_size", "6GiB", "part_size = '6GiB' (from --part-size): must be at most 5GiB"),
    ("part_size", "8 bananas", "part_size = '8 bananas' (from --part-size): must be a number of bytes, or text"),
    ("settle", "-1", "settle = '-1' (from --settle): must be a number of seconds"),
    ("settle", float("nan"), "settle = nan (from --settle): must be at least 0s"),
    ("settle", float("inf"), "settle = inf (from --settle): must be a finite number"),
    ("quiet", 0, "quiet = 0 (from --quiet): must be at least 0.1s"),
    ("upload_concurrency", 0, "upload_concurrency = 0 (from --upload-concurrency): expected `int` >= 1"),
    ("publish", "maybe", "publish = 'maybe' (from --publish): expected `bool`"),
    ("test_level", "none", "test_level = 'none' (from --test-level): must be one of checksum, bytes, load"),
    ("presets", [], "presets = [] (from --presets): expected `array` of length >= 1"),
    ("metrics", "9464", "metrics = '9464' (from --metrics): must be HOST:PORT"),
    ("metrics", "localhost:65536", "metrics = 'localhost:65536' (from --metrics): must be HOST:PORT"),
    ("run", "../other", "run = '../other' (from --run): must be a relative directory path"),
    ("run", "/abs", "run = '/abs' (from --run): must be a relative directory path"),
    ("member", "a/b", "member = 'a/b' (from --member): must be 1 to 128 bytes"),
    ("member", " ", "member = ' ' (from --member): must be 1 to 128 bytes"),
    ("members", "a,,b", "members = 'a,,b' (from --members): 'a,,b' is not a list of names"),
    ("members", "n[3-1]", "members = 'n[3-1]' (from --members): '3-1' is not a number or a range of numbers"),
    ("members", "0", "members = '0' (from --members): members must be a number from 1 to 100000"),
    ("members", "a,a/b", "members = 'a,a/b' (from --members): must be 1 to 128 bytes"),
    ("owner", "me", "owner = 'me' (from --owner): must be one of auto, yes, no"),
    ("mountpoint", "", "mountpoint = '' (from MOUNTPOINT): must name a directory"),
    ("store", "/data", "store = '/data' (from --store): must be file:///absolute/directory or s3://bucket/prefix"),
    ("store", "file://data", "store = 'file://data' (from --store): a directory store is file:// and an absolute path"),
    ("store", "s3:///prefix", "store = 's3:///prefix' (from --store): an S3 store is s3://bucket/prefix"),
    ("store", "s3://bucket/a/../b", "store = 's3://bucket/a/../b' (from --store): the prefix must not hold"),
    ("store", "s3://KEY:hunter2@bucket", "store = 's3://***@bucket' (from --store): an S3 store is"),
    ("endpoint_url", "https://u:hunter2@h", "endpoint_url = 'https://***@h' (from --endpoint-url): must be http://HOST"),
    ("endpoint_url", "h:9000", "endpoint_url = 'h:9000' (from --endpoint-url): must be http://HOST"),
    ("speed", 1, "unknown key 'speed' among the flags"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "message"), BAD_FLAGS)
def test_bad_values_name_the_key_the_value_and_the_source(name, value, message):
    with pytest.raises(InvalidError, match=re.escape(message)) as caught:
        load(None, {}, FLAGS | {name: value})
    assert "\n" not in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("part-size = 1", "unknown key 'part-size' in {file}; did you mean 'part_size'?"),
        ("mount_point = 'x'", "unknown key 'mount_point' in {file}; did you mean 'mountpoint'?"),
        ("[cache]\nx = 1", "unknown key 'cache' in {file}"),
        ("run = 3", "run = 3 (from {file}): expected `str`, got `int`"),
        ("settle = true", "settle = True (from {file}): expected `float`, got `bool`"),
        ("mountpoint = 1", "mountpoint = 1 (from {file}): "),
        ("preset = 1", "preset = 1 (from {file}): expected `array`, got `int`"),
        ("run = ", "{file} is not valid TOML: "),
        ("run = 'a'\nrun = 'b'", "{file} is not valid TOML: "),
    ],
)
def test_bad_files_are_named(toml, text, message):
    file = toml(text)
    with pytest.raises(InvalidError, match=re.escape(message.format(file=file))) as caught:
        load(file, {}, FLAGS)
    assert "\n" not in str(caught.value)


def test_unreadable_and_undecodable_files(tmp_path):
    with pytest.raises(InvalidError, match=r"cannot read the configuration file .*: No such file"):
        load(tmp_path / "absent.toml", {}, FLAGS)
    (tmp_path / "latin.toml").write_bytes(b'run = "\xff"')
    with pytest.raises(InvalidError, match=r"latin\.toml is not valid TOML"):
        load(tmp_path / "latin.toml", {}, FLAGS)


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("CACHEFS_PARTSIZE", "unknown variable CACHEFS_PARTSIZE; did you mean CACHEFS_PART_SIZE?"),
        ("CACHEFS_PRESET", "CACHEFS_PRESET: 'preset' can be set in the configuration file only"),
        ("CACHEFS_QUIET", "quiet = 'x' (from CACHEFS_QUIET): must be a number of seconds"),
    ],
)
def test_bad_variables_are_named(variable, message):
    with pytest.raises(InvalidError, match=re.escape(message)):
        load(None, {variable: "x"}, FLAGS)


def test_variables_of_others_are_left_alone():
    assert load(None, {"CACHEFS_PORT": "tcp://10.0.0.1:80", "CACHEFS_SERVICE_HOST": "10.0.0.1"}, FLAGS) == load(
        None, {}, FLAGS
    )


@pytest.mark.parametrize("name", ["mountpoint", "store", "staging"])
def test_required_keys(name):
    with pytest.raises(InvalidError, match=f"{name} is not set") as caught:
        load(None, {}, {key: value for key, value in FLAGS.items() if key != name})
    assert KEYS[name].env in caught.value.hint
    assert KEYS[name].flag in caught.value.hint


@pytest.mark.parametrize(
    ("mountpoint", "staging", "store", "message"),
    [
        ("/a", "/a", "/s", "staging /a is the same directory as mountpoint /a"),
        ("/a", "/a/b", "/s", "staging /a/b lies inside mountpoint /a"),
        ("/a/b", "/a", "/s", "mountpoint /a/b lies inside staging /a"),
        ("/a", "/b", "/a/s", "store /a/s lies inside mountpoint /a"),
        ("/a", "/b", "/b/tree/s", "store /b/tree/s lies inside staging /b"),
        ("/s/a", "/b", "/s", "mountpoint /s/a lies inside store /s"),
        ("/a/../b", "/b", "/s", "staging /b is the same directory as mountpoint /b"),
    ],
)
def test_directories_inside_one_another_are_refused(mountpoint, staging, store, message):
    with pytest.raises(InvalidError, match=re.escape(message)):
        load(None, {}, {"mountpoint": mountpoint, "staging": staging, "store": f"file://{store}"})


def test_directories_with_a_common_beginning_of_their_names_are_fine():
    assert load(None, {}, {"mountpoint": "/a", "staging": "/ab", "store": "file:///abc"}).staging == Path("/ab")


def test_a_symbolic_link_does_not_hide_that_staging_lies_in_the_mount(tmp_path):
    (tmp_path / "mount").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mount")
    with pytest.raises(InvalidError, match=r"staging .* lies inside mountpoint"):
        load(None, {}, {"mountpoint": tmp_path / "mount", "staging": tmp_path / "link" / "s", "store": "s3://bucket"})


def test_one_key_of_a_file_on_the_command_line_as_the_service_file_asks_for_it(toml):
    def ask(file):
        command = [sys.executable, "-m", "cachefs.config", "mountpoint", str(file)]
        return subprocess.run(command, capture_output=True, text=True, env={}, timeout=60, check=False)

    assert ask(toml('mountpoint = "/mnt/ckpt"\n')).stdout == "/mnt/ckpt\n"
    refused = ask(toml("mountpoint = 3\n"))
    assert (refused.returncode, refused.stdout) == (InvalidError.exit_code, "")


def test_the_readme_lists_every_key(readme_table):
    assert readme_table("config") in (None, table())
