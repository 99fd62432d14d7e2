"""Makes ``lm_eval --model saccade`` work: lm-eval has no entry points, only a table of models filled on import.

A distribution of its own (``pip install ./plugins/lm_eval``), for whoever wants just that: ``python -m
saccade.eval.harness`` does the same without. It runs at every start of the interpreter (saccade_lm_eval.pth), so it
does next to nothing and imports nothing: it puts a finder first that waits for ``lm_eval.models``, steps aside, and
adds one line to the table once that is loaded.
"""

import sys


class _Waiting:
    done = False

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "lm_eval.models" or _Waiting.done:
            return None
        _Waiting.done = True  # wherever it still stands: other tools wrap finders, or the whole list
        if _Waiting in sys.meta_path:
            sys.meta_path.remove(_Waiting)
        from importlib.util import find_spec

        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                _register()

            spec.loader.exec_module = exec_module
        return spec


def _register():
    try:
        from lm_eval.api.registry import model_registry

        if "saccade" not in model_registry:
            model_registry.register("saccade", target="saccade.eval.harness:SaccadeLM")
    except Exception as error:  # another version of lm-eval: its other models must go on working
        import warnings

        warnings.warn(f"lm-eval does not take the model 'saccade': {error}", RuntimeWarning, stacklevel=2)


sys.meta_path.insert(0, _Waiting)
