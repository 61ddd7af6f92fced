"""How much may be in flight, of one frontend and of all. A request's tokens are its prompt and all it may generate."""

from __future__ import annotations

from ...ipc.config import SchedulerConfig
from ...ipc.errors import InvalidRequestError, OverloadedError
from .fair_share import FairShare
from .request import Request


def check(limits: SchedulerConfig, fair: FairShare, request: Request, resumed: bool, cores: int = 1) -> None:
    """Whether `request` may be added to what is in flight. One that is `resumed` was let in before, perhaps by another
    of so many `cores`: the limits of all frontends together do not bind it, and of its own frontend's it has as many.

    Raises:
        OverloadedError: not now.
        InvalidRequestError: never, it exceeds a limit alone.
    """
    frontend, tokens = fair.of(request.frontend), request.max_len
    checks = [
        ("max_requests_per_frontend", "this frontend has", "requests", len(frontend.requests), 1),
        ("max_tokens_per_frontend", "this frontend has", "tokens", frontend.tokens_in_flight, tokens),
    ]
    if not resumed:
        queued, most = fair.num_requests - limits.max_num_seqs, limits.max_num_queued_requests
        if most is not None and queued >= most:
            raise OverloadedError(
                f"{queued} requests wait for a seat already; max_num_queued_requests is {most}: send it again later"
            )
        checks += [
            ("max_requests_in_flight", "all frontends have", "requests", fair.num_requests, 1),
            ("max_tokens_in_flight", "all frontends have", "tokens", fair.num_tokens, tokens),
        ]
    for name, whose, what, have, more in checks:
        limit = getattr(limits, name)
        if limit is None or have + more <= limit * (cores if resumed else 1):
            continue
        if more > limit:
            raise InvalidRequestError(
                f"prompt and max_tokens come to {more} tokens; {name} is {limit}: ask for fewer, or raise the limit"
            )
        raise OverloadedError(
            f"{whose} {have} {what} in flight and this request adds {more}; {name} is {limit}: send it again later"
        )
