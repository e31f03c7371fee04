"""The policy's `oidc` section: whose signed tokens are taken as keys, and what their claims mean here.

Owns the checks of that section. Promises: only asymmetric algorithms can be named, so that no public key can ever be taken
for a shared secret; key sets come over https, from this host, or from a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from gateway.policy_base import Seconds

Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
Text = Annotated[str, Field(min_length=1, max_length=512)]
_LOCAL = {"127.0.0.1", "localhost", "::1"}


class Oidc(BaseModel):
    """One issuer. A claim is named as it stands, or by a path with dots (`realm_access.roles`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    issuer: Text
    audience: Text
    jwks_url: str | None = None
    jwks_file: Path | None = None
    jwks_ca: Path | None = None  # the authority of the issuer's certificate; null: the public ones
    algorithms: Annotated[tuple[Algorithm, ...], Field(min_length=1)] = ("RS256", "ES256", "EdDSA")
    tenant_claim: Text = "tenant"
    role_claim: Text | None = None  # null: every token is a client's
    roles: dict[Text, Literal["client", "operator", "scraper", "prober"]] = {}  # the first that the token has counts
    leeway_s: Annotated[float, Field(ge=0, le=300)] = 30
    refresh_s: Seconds = 300  # how often the keys are fetched
    refetch_s: Seconds = 10  # an unknown key id fetches them at once, but no more often than this
    max_age_s: Seconds = 3600  # keys that could not be fetched again for so long are not used any more

    @field_validator("jwks_url")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if not parts.hostname or parts.username or parts.password or parts.fragment:
            raise ValueError("jwks_url names a host, and holds no credentials and no fragment")
        if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _LOCAL):
            raise ValueError("jwks_url is https://, or http:// on this host: who can change the keys can make any token")
        return value

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.jwks_url is None) == (self.jwks_file is None):
            raise ValueError("one of jwks_url and jwks_file is needed")
        if (self.role_claim is None) != (not self.roles):
            raise ValueError("role_claim and roles go together")
        if self.max_age_s < self.refresh_s:
            raise ValueError("max_age_s is at least refresh_s")
        return self
