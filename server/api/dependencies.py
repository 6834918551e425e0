"""What FastAPI hands to a route that asks for it."""

from typing import Annotated

from fastapi import Depends, Request

from ..service import Service


def service_of(request: Request) -> Service:
    """The service behind the app that a request came to."""
    return request.app.state.service


UsedService = Annotated[Service, Depends(service_of)]
