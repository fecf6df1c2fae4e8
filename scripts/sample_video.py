r"""Sample a clip or an image from a fine-tuned pipeline, with stock diffusers alone, and write it as mp4 or png.

Several prompts, seeds, strengths of adapters or numbers of steps make one file with all of them side by side.

python scripts/sample_video.py trained --prompt "a red circle moving left" --output clip.mp4
python scripts/sample_video.py trained-i2v --image first.png --prompt "it moves left" --output clip.mp4
python scripts/sample_video.py Wan-AI/Wan2.1-T2V-1.3B-Diffusers --adapter trained=0.8 --adapter style.safetensors \
    --compare_base --prompt "a dog" "a cat" --seed 0 1 --output grid.mp4
python scripts/sample_video.py FLUX.2-klein --adapter trained --reference before.png --prompt "make it night" \
    --output after.png
python scripts/sample_video.py trained-vace --control depth.mp4 --reference cat.png --prompt "it runs" \
    --output clip.mp4
"""

from hf_bucketing.command_line.script import run_script
from hf_bucketing.commands.sample import main, make_parser

if __name__ == "__main__":
    run_script(main, make_parser)
