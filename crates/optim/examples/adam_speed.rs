//! Prints how near an Adam step comes to the memory's speed: `adam_speed [WEIGHTS]`, 100 million unless told.

use ferrospeed_tensor::Device;

fn main() {
    let numel = match std::env::args().nth(1).map(|text| text.parse::<usize>()) {
        None => 100_000_000,
        Some(Ok(numel)) => numel,
        Some(Err(error)) => {
            eprintln!("adam_speed: the number of weights: {error}");
            std::process::exit(2);
        }
    };
    let speed = ferrospeed_optim::bench::adam(numel, &Device::cpu());
    println!(
        "{} weights: {:.2} ns each, {:.1} GB/s; in-place scaling {:.1} GB/s; ratio {:.2}",
        speed.numel,
        speed.ns_per_element,
        speed.bytes_per_s / 1e9,
        speed.memory_bytes_per_s / 1e9,
        speed.share_of_memory_speed()
    );
}
