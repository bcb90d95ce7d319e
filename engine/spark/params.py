"""What estimators and their models have in common: parameters in JSON, and what is no JSON in a pickle beside them."""

from __future__ import annotations

import pickle
from typing import Any

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader, MLWritable, MLWriter

from .. import __version__, readable
from ..launch.errors import LaunchError

OBJECTS = "objects"  # the directory of the pickle
PIECE = 32 << 20  # bytes of it in a row


def param(name: str, doc: str, convert: Any = TypeConverters.identity) -> Param[Any]:
    """A parameter, as a class attribute of a stage."""
    return Param(Params._dummy(), name, doc, convert)


class Stage(Params, MLWritable, MLReadable[Any]):
    """A stage of a pipeline whose parameters are its class attributes of type `Param`, and which is saved and loaded.

    What `OBJECT_NAMES` names are attributes of any kind. They are pickled, in `OBJECTS` beside the parameters, so that
    loading a stage runs code: load what trusted users have saved. Spark writes both, so a path means one place.
    """

    OBJECT_NAMES: tuple[str, ...] = ()
    NOT_SAVED: tuple[str, ...] = ()  # of these, those that a loaded stage has not

    def _fill(self, given: dict[str, Any]) -> None:
        """Take parameters and objects by name; None leaves the default.

        Raises
        ------
        TypeError
            There is none of that name.
        """
        for name, value in given.items():
            if name in self.OBJECT_NAMES:
                setattr(self, f"_{name}", value)
            elif not self.hasParam(name):
                known = sorted({*self.OBJECT_NAMES, *(each.name for each in self.params)})
                raise TypeError(f"{type(self).__name__} has no parameter {name!r}; it has {', '.join(known)}")
            elif value is not None:
                self.set(self.getParam(name), value)

    def _value(self, param: Param[Any]) -> Any:
        """The value of a parameter, None if it has neither that nor a default."""
        return self.getOrDefault(param) if self.isDefined(param) else None

    def _packed(self) -> Any:
        """What is pickled of the objects: unpickled, it is a dict of them."""
        return {name: getattr(self, f"_{name}") for name in self.OBJECT_NAMES if name not in self.NOT_SAVED}

    def write(self) -> MLWriter:
        """What saves this stage."""
        return _Writer(self)

    @classmethod
    def read(cls) -> MLReader[Any]:
        """What loads a stage of this class."""
        return _Reader(cls)


class _Writer(DefaultParamsWriter):
    """Saves parameters as Spark does, and the objects as rows of a Parquet file."""

    def saveImpl(self, path: str) -> None:
        from pyspark import cloudpickle

        stage, spark = self.instance, self.sparkSession
        assert isinstance(stage, Stage)
        data = cloudpickle.dumps(stage._packed())
        self.saveMetadata(stage, path, spark, {"engineVersion": __version__})
        pieces = [(number, data[at : at + PIECE]) for number, at in enumerate(range(0, len(data), PIECE))]
        frame = spark.createDataFrame(pieces, "number int, data binary")
        frame.coalesce(1).write.parquet(f"{path.rstrip('/')}/{OBJECTS}")


class _Reader(DefaultParamsReader[Any]):
    """Loads what `_Writer` has saved."""

    def load(self, path: str) -> Any:
        """The stage.

        Raises
        ------
        LaunchError
            Another version has saved it, and this one cannot make it.
        """
        version = self.loadMetadata(path, self.sparkSession).get("engineVersion")
        try:
            stage = super().load(path)
            rows = self.sparkSession.read.parquet(f"{path.rstrip('/')}/{OBJECTS}").orderBy("number").collect()
            stage._fill(pickle.loads(b"".join(row.data for row in rows)))
        except Exception as error:
            if version == __version__:
                raise
            told = f"{path} was saved by version {version or 'unknown'}, and {__version__} cannot load it"
            raise LaunchError(f"{told}: {readable.exception(error)}") from error
        return stage
