//! What ranks put away together comes back as it was, and each holds its part meanwhile.

use std::sync::{Arc, Mutex};

use ferrospeed_collective::shelf::Spread;
use ferrospeed_comm::World;
use ferrospeed_tensor::autograd::{InPlace, Restore, Shelf};
use ferrospeed_tensor::{Result, Tensor};

/// Notes how many elements it is given.
#[derive(Debug, Default)]
struct Counting(Mutex<Vec<usize>>);

impl Shelf for Counting {
    fn put(&self, tensor: Tensor) -> Result<Restore> {
        self.0.lock().unwrap().push(tensor.numel());
        InPlace.put(tensor)
    }
}

#[test]
fn a_spread_tensor_comes_back_whole_on_every_rank() {
    // Shapes that three ranks can share evenly, and that they cannot.
    for shape in [vec![3, 4], vec![2, 5], vec![1], vec![7, 1, 3]] {
        let numel: usize = shape.iter().product();
        let values: Vec<f32> = (0..numel).map(|i| (i as f32).sin()).collect();
        let ranks = World::threads(3).into_iter().map(|world| {
            let (shape, values) = (shape.clone(), values.clone());
            std::thread::spawn(move || {
                let counting = Arc::new(Counting::default());
                let shelf = Spread::over(&world.group(), counting.clone());
                let tensor = Tensor::from_slice(&values, &*shape, &ferrospeed_cpu::with_threads(1)).unwrap();
                let again = shelf.put(tensor).unwrap()().unwrap();
                assert_eq!(again.sizes(), shape);
                assert_eq!(again.to_vec::<f32>().unwrap(), values);
                assert_eq!(*counting.0.lock().unwrap(), [values.len().div_ceil(3)]);
            })
        });
        ranks.collect::<Vec<_>>().into_iter().for_each(|rank| rank.join().expect("a rank panicked"));
    }
}
