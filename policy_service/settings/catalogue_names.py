"""The names that entries of a catalogue may refer to, with hints for typing errors."""

from __future__ import annotations

from dataclasses import dataclass, field

from policy_service.domain.catalogue import Catalogue, ProviderDirectory
from policy_service.settings.catalogue_entries import Entries
from policy_service.settings.problems import did_you_mean

_MOST_HINTS = 50
"""Looking for a similar name is slow in large files, and nobody reads more hints than this."""
_MOST_NAMES = 20


@dataclass(slots=True)
class Known:
    """Names of one catalogue. A connection that is declared but unusable counts as known: its own problem is told."""

    catalogue: Catalogue
    directory: ProviderDirectory
    connections: frozenset[str]
    providers_in_use: frozenset[str]
    _hints_left: int = field(default=_MOST_HINTS)

    @classmethod
    def of(cls, entries: Entries, catalogue: Catalogue) -> Known:
        """The names of a compiled catalogue and of its document."""
        used = frozenset(connection.provider for connection in catalogue.connections.values())
        return cls(catalogue, ProviderDirectory(catalogue.providers), frozenset(entries.named["connections"]), used)

    def connection_hint(self, name: str) -> str:
        """What to do about an unknown connection."""
        return self._similar(name, sorted(self.connections)) or "declare it below connections"

    def provider_hint(self, name: str, otherwise: str) -> str:
        """What to do about an unknown provider."""
        return self._similar(name.lower(), self._provider_names()) or otherwise

    def connection_names(self) -> str:
        """The first connections, for a message."""
        return some(sorted(self.connections))

    def _provider_names(self) -> list[str]:
        plain = (p for p in self.catalogue.providers.values() if "*" not in p.id)
        return [name for p in plain for name in (p.id, *p.aliases)]

    def _similar(self, name: str, names: list[str]) -> str:
        if self._hints_left <= 0:
            return ""
        self._hints_left -= 1
        return did_you_mean(name, names)


def some(names: list[str]) -> str:
    """The first names of a list, for a message."""
    return ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
