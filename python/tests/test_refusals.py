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
        self.refused("(?s)zero_optimisation.*did you mean", ferrospeed.ConfigError, config=CONFIG | {"zero_optimisation": {}})
        self.refused("is not of the module", model_parameters=[nn.Parameter(torch.ones(2))])

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
        given = program.config_of({"stage": 0})
        config = {name: value for name, value in given.items() if name != "optimizer"}
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

    def test_a_state_dictionary_of_spread_weights_is_refused_unless_they_are_whole(self) -> None:
        engine, *_ = initialize(config=program.config_of({"stage": 3}))
        with self.assertRaisesRegex(ferrospeed.FerrospeedError, "within zero.GatheredParameters"):
            engine.module.state_dict()
        batch = modules.batch("mlp", 4, 0, 0)
        with ferrospeed.zero.GatheredParameters(engine.module.parameters()):
            # A forward within leaves them whole.
            loss = engine(batch)
            saved = {name: value.clone() for name, value in engine.module.state_dict().items()}
        plain = modules.make("mlp")
        plain.load_state_dict(saved)
        self.assertEqual(plain(batch).item(), loss.item())

    def test_a_group_without_anything_to_train_is_left_out(self) -> None:
        module = modules.make("mlp")
        for param in module.layers.parameters():
            param.requires_grad_(False)
        groups = [{"params": list(module.layers.parameters()), "lr": 0.5}, {"params": list(module.head.parameters()), "lr": 0.25}]
        for stage in (1, 3):
            engine, optimizer, *_ = initialize(model=module, model_parameters=groups, config=program.config_of({"stage": stage}))
            self.assertEqual(engine.get_lr(), [0.25])
            engine.backward(engine(modules.batch("mlp", 4, 0, 0)))
            optimizer.param_groups[1]["lr"] = 0.125
            engine.step()
            self.assertEqual(engine.get_lr(), [0.125])
            module = modules.make("mlp")
            for param in module.layers.parameters():
                param.requires_grad_(False)
            groups = [{"params": list(module.layers.parameters())}, {"params": list(module.head.parameters()), "lr": 0.25}]

    def test_recomputation_works_in_every_stage(self) -> None:
        from torch.utils.checkpoint import checkpoint

        found = []
        for stage in (0, 2, 3):
            for reentrant in (None, False):
                module = modules.make("gpt")
                engine, *_ = initialize(model=module, config=program.config_of({"stage": stage}))
                inner = module.last.forward
                if reentrant is not None:
                    module.last.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
                losses = []
                for number in range(3):
                    loss = engine(modules.batch("gpt", 4, 0, number))
                    engine.backward(loss)
                    engine.step()
                    losses.append(loss.item())
                found.append(losses)
        for losses in found:
            self.assertEqual(losses, found[0])

    def test_a_buffer_is_saved_and_loaded(self) -> None:
        import tempfile

        class Counting(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.head = nn.BatchNorm1d(16), nn.Linear(16, 8)

            def forward(self, batch):
                return nn.functional.cross_entropy(self.head(self.norm(batch["x"])), batch["y"])

        with tempfile.TemporaryDirectory() as folder:
            engine, *_ = initialize(model=Counting())
            for number in range(3):
                engine.backward(engine(modules.batch("mlp", 4, 0, number)))
                engine.step()
            engine.save_checkpoint(folder)
            again, *_ = initialize(model=Counting())
            again.load_checkpoint(folder)
            self.assertEqual(again.module.norm.num_batches_tracked.item(), 3)
            self.assertTrue(torch.equal(again.module.norm.running_mean, engine.module.norm.running_mean))


if __name__ == "__main__":
    unittest.main()
