"""What is not taken is refused by its name; nothing does nothing in silence."""

from __future__ import annotations

import unittest

import ranks

ranks.need_torch()

import torch  # noqa: E402
from torch import nn  # noqa: E402

import ferrospeed  # noqa: E402
import modules  # noqa: E402
import program  # noqa: E402

CONFIG = program.config_of({"stage": 1})


def initialize(**options):
    options = {"model": modules.make("mlp"), "config": CONFIG} | options
    return ferrospeed.initialize(**options)


class Refusals(unittest.TestCase):
    def refused(self, pattern: str, kind: type[Exception] = ferrospeed.FerrospeedError, **options) -> None:
        with self.assertRaisesRegex(kind, pattern):
            initialize(**options)

    def test_wrong_arguments_of_initialize(self) -> None:
        self.refused("model is int", model=3)
        self.refused("the model has no parameters", model=nn.ReLU())
        self.refused("there is no configuration", config=None)
        self.refused("mpu is not taken", NotImplementedError, mpu=object())
        self.refused("zero_optimisation.*did you mean", ferrospeed.ConfigError, config=CONFIG | {"zero_optimisation": {}})
        self.refused("of no engine|is not of the module", model_parameters=[nn.Parameter(torch.ones(2))])

    def test_optimizers_that_are_not_known(self) -> None:
        module = modules.make("mlp")
        config = {name: value for name, value in CONFIG.items() if name != "optimizer"}
        for optimizer, pattern in [
            (torch.optim.LBFGS(module.parameters()), "torch.optim.lbfgs.LBFGS is not known here"),
            (torch.optim.Adagrad(module.parameters(), lr_decay=0.1), "Adagrad with another lr_decay"),
        ]:
            self.refused(pattern, model=module, optimizer=optimizer, config=config)
        groups = [{"params": [param], "eps": 1e-8 * (1 + index)} for index, param in enumerate(module.parameters())]
        self.refused("eps differs between parameter groups", model=module, optimizer=torch.optim.AdamW(groups), config=config)

    def test_calls_at_the_wrong_time(self) -> None:
        engine, optimizer, *_ = initialize()
        with self.assertRaisesRegex(ferrospeed.FerrospeedError, "needs a backward"):
            engine.step()
        with self.assertRaisesRegex(ferrospeed.FerrospeedError, "one element"):
            engine.backward(torch.ones(2, requires_grad=True))
        with self.assertRaisesRegex(NotImplementedError, "spread over ranks"):
            optimizer.state_dict()
        with self.assertRaisesRegex(AttributeError, "the engine has no attribute 'compile_nothing'"):
            engine.compile_nothing

    def test_a_backward_that_fails_leaves_nothing_behind(self) -> None:
        class Broken(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, gradient):
                raise ValueError("broken on purpose")

        for stage in (0, 2, 3):
            engine, *_ = initialize(config=program.config_of({"stage": stage}))
            batch = modules.batch("mlp", 4, 0, 0)
            with self.assertRaisesRegex(ValueError, "broken on purpose"):
                engine.backward(Broken.apply(engine(batch)) + engine(batch))
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            self.assertLess(engine(batch).item(), loss.item())

    def test_a_rate_that_the_program_sets_is_the_engines(self) -> None:
        engine, optimizer, *_ = initialize()
        before = engine.module.head.weight.detach().clone()
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.param_groups[0]["weight_decay"] = 0.0
        engine.backward(engine(modules.batch("mlp", 4, 0, 0)))
        engine.step()
        self.assertEqual(engine.get_lr(), [0.0])
        self.assertTrue(torch.equal(engine.module.head.weight, before))

    def test_the_programs_own_optimizer_and_schedule(self) -> None:
        config = {name: value for name, value in CONFIG.items() if name != "optimizer"}
        kinds = {"AdamW": {"weight_decay": 0.1}, "Adam": {"weight_decay": 0.1}, "SGD": {"momentum": 0.9}, "Adagrad": {}}
        for kind, options in kinds.items():
            losses = []
            for framework in (False, True):
                module = modules.make("mlp")
                optimizer = getattr(torch.optim, kind)(module.parameters(), lr=0.02, **options)
                schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
                if framework:
                    engine, made, _, same = initialize(model=module, optimizer=optimizer, lr_scheduler=schedule, config=config)
                    self.assertIs(same, schedule)
                found = []
                for number in range(6):
                    loss = module(modules.batch("mlp", 4, 0, number))
                    if framework:
                        engine.backward(loss)
                        engine.step()
                    else:
                        optimizer.zero_grad()
                        loss.backward()
                        optimizer.step()
                        schedule.step()
                    found.append(loss.item())
                losses.append(found)
            for plain, ours in zip(*losses):
                self.assertAlmostEqual(plain, ours, delta=2e-6, msg=kind)

    def test_gathered_parameters_and_safe_access(self) -> None:
        for stage in (0, 3):
            engine, *_ = initialize(config=program.config_of({"stage": stage}))
            weight = engine.module.head.weight
            with ferrospeed.zero.GatheredParameters(weight, modifier_rank=0):
                weight.data.fill_(0.25)
            with ferrospeed.zero.GatheredParameters([weight]):
                self.assertEqual(weight.tolist(), torch.full((8, 32), 0.25).tolist())
            engine.backward(engine(modules.batch("mlp", 4, 0, 0)))
            gradient = ferrospeed.utils.safe_get_full_grad(weight)
            self.assertEqual(gradient.shape, weight.shape)
            self.assertGreater(gradient.abs().sum().item(), 0)
            engine.step()
            moment = ferrospeed.utils.safe_get_full_optimizer_state(weight, "exp_avg")
            self.assertTrue(torch.allclose(moment, 0.1 * gradient))
            ferrospeed.utils.safe_set_full_fp32_param(weight, torch.ones(8, 32))
            self.assertEqual(ferrospeed.utils.safe_get_full_fp32_param(weight).mean().item(), 1.0)


if __name__ == "__main__":
    unittest.main()
