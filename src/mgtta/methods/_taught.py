"""What CoTTA and RoTTA have in common: a teacher predicts, and is saved and loaded with the method."""

from typing import Any

from mgtta.adaptation.method import Method
from mgtta.models.classifier import Classifier


class Taught(Method):
    """A method whose teacher predicts. Subclasses set `teacher`, and `taught`: the names of what moves in it."""

    teacher: Classifier
    taught: list[str]

    @property
    def predicting(self) -> Classifier:
        return self.teacher

    def own_state(self) -> Any:
        teacher = {name: self.teacher.get_parameter(name).detach() for name in self.taught}
        return {**super().own_state(), "teacher": teacher}

    def load_own_state(self, own: Any) -> None:
        super().load_own_state(own)
        for name in self.taught:
            self.teacher.get_parameter(name).copy_(own["teacher"][name])
