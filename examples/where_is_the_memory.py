"""Shows where the memory of a training step goes, before and after conversion.

    python where_is_the_memory.py --model resnet50 --batch 4 --side 224 --html step.html
    python where_is_the_memory.py --model resnet50 --batch 128 --fake --budget 8GiB

Any classification model of torchvision can be named. With --fake nothing is computed, so that any size can be asked.
"""

import argparse

import torch
import torchvision

import patchconv_native as pc


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--fake", action="store_true", help="predict: compute nothing")
    parser.add_argument("--budget", help="also say which plan fits it, such as 8GiB")
    parser.add_argument("--html", help="a file for the converted step's report, as a page")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = torchvision.models.get_model(arguments.model, weights=None)
    device = "meta" if arguments.fake else "cpu"
    x = torch.empty(arguments.batch, 3, arguments.side, arguments.side, device=device)
    if not arguments.fake:
        x.uniform_()

    options = {"optimizer": torch.optim.AdamW, "fake": arguments.fake}
    stock = pc.memory.trace(model, x, **options)
    print(stock)  # by module: memory before, after and at most, and what is saved for the backward pass
    pc.convert(model)
    converted = pc.memory.trace(model, x, **options)
    print(pc.memory.compare({"stock": stock, "converted": converted}))
    if arguments.html:
        print("written:", converted.save(arguments.html))
    if arguments.budget:
        pc.revert(model)
        try:
            print(pc.plan(model, x, budget=arguments.budget, optimizer=torch.optim.AdamW))
        except pc.BudgetError as error:
            print(error)


if __name__ == "__main__":
    main()
