"""Who runs, who waits, who is refused: the one bounded queue in front of the cluster (L12). See README.md.

Pure: time is an argument; it knows requests by name, tenants by tag, and nothing of workers or streams.
"""

from __future__ import annotations

from headrace.router.admission.admission import Admission
from headrace.router.admission.first_tokens import FirstTokens
from headrace.router.admission.terms import (
    AdmissionLimits,
    Cause,
    Changes,
    NoPlace,
    Refused,
    Ticket,
    TooLate,
)

__all__ = ["Admission", "AdmissionLimits", "Cause", "Changes", "FirstTokens", "NoPlace", "Refused", "Ticket", "TooLate"]
