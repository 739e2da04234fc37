"""Everyone comes in: the engines' own queue limit is the only one."""

from __future__ import annotations

from typing import ClassVar

from headrace.types import AdmissionView, Admit, Queue, Reject, TicketView


class Unlimited:
    name: ClassVar[str] = "unlimited"

    def admit(self, ticket: TicketView, view: AdmissionView, now: float) -> Admit | Queue | Reject:
        return Admit()
