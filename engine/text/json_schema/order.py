"""Members of a value in the order in which a schema's grammar has them."""

from __future__ import annotations

from headrace.engine.text.json_schema.alternatives import ANYTHING, Array, Conjunction, Object
from headrace.engine.text.json_schema.documents import Documents
from headrace.engine.text.json_schema.expand import Expander
from headrace.engine.text.json_schema.members import members_of
from headrace.engine.text.json_schema.satisfies import satisfies
from headrace.engine.text.json_schema.values import Json


class SchemaOrder:
    """Of one schema. Names come as `properties` lists them, then others that are required, then the rest as they are;
    of several schemas for one value the outer speaks first. Raises SchemaRefused as `schema_grammar` does."""

    def __init__(self, schema: str, *, formats: bool = False) -> None:
        documents = Documents(schema)
        self._expander = Expander(documents, formats)
        self._root = frozenset({documents.root})

    def of(self, value: Json) -> Json:
        """The same value; one that is no instance as if it were."""
        return self._of(value, self._root)

    def _of(self, value: Json, numbers: Conjunction) -> Json:
        kind = Object if isinstance(value, dict) else Array
        if numbers == ANYTHING or not isinstance(value, dict | list):
            return value
        fitting = [one for one in self._expander.conjunction(numbers) if isinstance(one, kind)]
        good = [one for one in fitting if satisfies(value, one, self._expander.conjunction)]
        if not fitting:
            return value
        one = (good or fitting)[0]
        if isinstance(value, list):
            assert isinstance(one, Array)
            return [self._of(item, one.at(place)) for place, item in enumerate(value)]
        assert isinstance(one, Object)
        names = [name for name in one.names if name in value]
        names += [name for name in value if name not in one.names]
        return {name: self._of(value[name], members_of(one, name)) for name in names}
