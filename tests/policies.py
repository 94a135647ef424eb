"""What AWS would answer: an evaluator for the part of the IAM policy language that the documents use.

From the IAM user guide, "Policy evaluation logic": a matching Deny wins; otherwise one matching Allow is needed. What
is not known here (an element, an operator, a key) fails, so no statement is silently taken for harmless.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


class Request:
    """One request: `action` and `resource` as IAM names them, `context` the condition keys that it carries."""

    def __init__(self, principal: str, action: str, resource: str, context: Mapping[str, str]) -> None:
        self.action = action
        self.resource = resource
        self.context = {"aws:PrincipalArn": principal, **context}


def allowed(request: Request, identity: Mapping[str, Any], bucket: Mapping[str, Any]) -> bool:
    """Return whether a principal with the policy `identity` may do it in a bucket with the policy `bucket`."""
    effects = [
        statement["Effect"]
        for document in (identity, bucket)
        for statement in document["Statement"]
        if _applies(statement, request)
    ]
    return "Deny" not in effects and "Allow" in effects


def _applies(statement: Mapping[str, Any], request: Request) -> bool:
    assert statement.keys() <= {"Sid", "Effect", "Principal", "Action", "Resource", "Condition"}
    assert statement.get("Principal", "*") == "*"
    return (
        request.action in _many(statement["Action"])
        and any(matches(pattern, request.resource) for pattern in _many(statement["Resource"]))
        and all(
            _holds(operator, key, wanted, request.context)
            for operator, keys in statement.get("Condition", {}).items()
            for key, wanted in keys.items()
        )
    )


def _many(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def matches(pattern: str, text: str) -> bool:
    """`*` is any characters, also slashes; `?` is one; `${*}`, `${?}` and `${$}` are the characters themselves."""
    tokens = re.findall(r"\$\{[*?$]\}|.", pattern, re.DOTALL)
    parts = {"*": ".*", "?": "."}
    regex = "".join(re.escape(token[2]) if len(token) == 4 else parts.get(token, re.escape(token)) for token in tokens)
    return re.fullmatch(regex, text, re.DOTALL) is not None


def _holds(operator: str, key: str, wanted: str | list[str], context: Mapping[str, str]) -> bool:
    assert key in {
        "aws:PrincipalArn", "s3:if-none-match", "s3:if-match", "s3:ObjectCreationOperation", "s3:x-amz-copy-source"
    }  # fmt: skip
    found = context.get(key)
    match operator:
        case "Null":
            return (found is None) == (wanted == "true")
        case "Bool":
            return found == wanted
        case "ArnNotEquals" | "ArnNotLike":  # also true when the key is not there
            return found is None or not any(matches(pattern, found) for pattern in _many(wanted))
    raise AssertionError(f"unknown operator {operator}")
