"""/admin/policies: what is in force, how it fares, and another one in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.gateway.admin import AdminEndpoint, Answer
from headrace.gateway.auth import Access
from headrace.gateway.json_body import decode_body
from headrace.gateway.operation import Operation
from headrace.gateway.policy_desk import PolicyDesk
from headrace.types import PolicyChoice


class NewPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /admin/policies/{kind}: `{use, options}` as in the YAML.

    A script's path is one of the server's machine; a relative one counts from the YAML's folder.
    """

    use: str
    options: dict[str, Any] = {}
    model: str = ""
    """Whose engines; left out: every model's."""


NEW_POLICY = msgspec.json.Decoder(NewPolicy)


@dataclass(frozen=True, slots=True)
class PolicyAdmin:
    """What /admin does with policies."""

    desk: PolicyDesk

    async def listed(self, parameters: dict[str, str], raw: bytes) -> Answer:
        """Say what is in force: per policy its kind, name, strikes, failures and the last one's reason."""
        rows = [
            {"model": each.model, "replica": each.replica, **msgspec.to_builtins(each.state)}
            for each in self.desk.in_force()
        ]
        return 200, {"policies": rows}

    async def swap(self, parameters: dict[str, str], raw: bytes) -> Answer:
        body = decode_body(raw, NEW_POLICY)
        choice = PolicyChoice(body.use, body.options)
        swapped = await self.desk.swap(parameters["kind"], choice, model=body.model)
        return 200, msgspec.to_builtins(swapped)


def policy_operations(admin: PolicyAdmin, access: Access) -> list[Operation]:
    """Return the operations on policies, for the main port or one of their own."""
    return [
        Operation(
            "GET",
            "/admin/policies",
            access,
            AdminEndpoint(admin.listed),
            "Every policy in force and how it fares",
        ),
        Operation(
            "POST",
            "/admin/policies/{kind}",
            access,
            AdminEndpoint(admin.swap),
            "Put a policy in the place of the one in force",
            body=NewPolicy,
        ),
    ]
