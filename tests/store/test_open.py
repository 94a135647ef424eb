from __future__ import annotations

import pytest

from cachefs.errors import InvalidError
from cachefs.store.base import Condition
from cachefs.store.directory import DirectoryStore
from cachefs.store.open import open_store
from cachefs.store.s3 import S3Store


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("file:///mnt/ckpt", "file:///mnt/ckpt"),
        ("file:///mnt/a%20b/", "file:///mnt/a b"),
    ],
)
def test_directories(url, shown):
    store = open_store(url)
    assert isinstance(store, DirectoryStore)
    assert (store.url, store.prefix) == (shown, "")


@pytest.mark.parametrize(
    ("url", "shown", "prefix"),
    [
        ("s3://bucket", "s3://bucket", ""),
        ("s3://bucket/", "s3://bucket", ""),
        ("s3://my.bucket-1/team/ckpt/", "s3://my.bucket-1/team/ckpt", "team/ckpt"),
    ],
)
def test_buckets(url, shown, prefix):
    store = open_store(url, endpoint_url="http://127.0.0.1:1", region="eu-west-1", connections=3)
    assert isinstance(store, S3Store)
    assert (store.url, store.prefix) == (shown, prefix)
    store.close()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "bucket/prefix",
        "/mnt/ckpt",
        "file://host/dir",
        "file:relative",
        "s3:///prefix",
        "s3://b/p?versionId=1",
        "s3://key:secret@bucket/p",
        "s3://a b/p",
        "gs://bucket/p",
        "https://bucket.s3.amazonaws.com/p",
    ],
)
def test_anything_else_is_refused(url):
    with pytest.raises(InvalidError) as caught:
        open_store(url)
    assert "s3://bucket/prefix" in caught.value.hint
    assert "secret" not in str(caught.value)


def test_an_endpoint_for_a_directory():
    with pytest.raises(InvalidError):
        open_store("file:///mnt", endpoint_url="http://x")


@pytest.mark.parametrize("fields", [{}, {"if_none_match": True, "if_match": "e"}])
def test_a_condition_is_exactly_one(fields):
    with pytest.raises(InvalidError):
        Condition(**fields)
