//! Convolution as matrix product: patches to rows and back; max pooling. Images are `[batch, channels, height, width]`.

use ferrospeed_tensor::backend::{Images, Window2d};
use ferrospeed_tensor::dtype::Float;
use ferrospeed_tensor::{Out, Result, Shape, Tensor};

use crate::{CpuBackend, float_kernel, read, write};

/// Calls `visit(row of the result, element inside the patch, flat index of the image or None in the padding)`.
fn walk(window: &Window2d, image: &Shape, mut visit: impl FnMut(usize, usize, Option<usize>)) -> Result<()> {
    let [out_h, out_w] = window.output_size("window", image)?;
    let [batch, channels, height, width] = [image[0], image[1], image[2], image[3]];
    for b in 0..batch {
        for oy in 0..out_h {
            for ox in 0..out_w {
                let row = (b * out_h + oy) * out_w + ox;
                let mut element = 0;
                for c in 0..channels {
                    for ky in 0..window.kernel[0] {
                        for kx in 0..window.kernel[1] {
                            let y = (oy * window.stride[0] + ky)
                                .checked_sub(window.padding[0])
                                .filter(|&y| y < height);
                            let x = (ox * window.stride[1] + kx)
                                .checked_sub(window.padding[1])
                                .filter(|&x| x < width);
                            let place = y.zip(x).map(|(y, x)| ((b * channels + c) * height + y) * width + x);
                            visit(row, element, place);
                            element += 1;
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

impl Images for CpuBackend {
    fn image_to_columns(&self, x: &Tensor, window: &Window2d, columns: Out<'_>) -> Result<()> {
        let patch = columns.shape().last();
        float_kernel!("image_to_columns", x.dtype(), T => {
            let (image, columns) = (read::<T>(x), write::<T>(columns));
            walk(window, x.shape(), |row, element, place| {
                columns[row * patch + element] = place.map_or(T::narrow(0.0), |place| image[place]);
            })
        })?
    }

    fn columns_to_image(&self, columns: &Tensor, window: &Window2d, x: Out<'_>) -> Result<()> {
        let (patch, shape) = (columns.shape().last(), x.shape());
        float_kernel!("columns_to_image", x.dtype(), T => {
            let (columns, image) = (read::<T>(columns), write::<T>(x));
            let mut sums = vec![0.0f32; image.len()];
            walk(window, shape, |row, element, place| {
                if let Some(place) = place {
                    sums[place] += columns[row * patch + element].widen();
                }
            })?;
            image.iter_mut().zip(sums).for_each(|(image, sum)| *image = T::narrow(sum));
            Ok(())
        })?
    }

    fn max_pool2d(&self, x: &Tensor, window: &Window2d, y: Out<'_>, indices: Out<'_>) -> Result<()> {
        let shape = x.shape();
        let (planes, height, width) = (shape[0] * shape[1], shape[2], shape[3]);
        let plane_shape = Shape::new(&[1, 1, height, width]);
        let [out_h, out_w] = window.output_size("max_pool2d", shape)?;
        let indices = write::<i64>(indices);
        float_kernel!("max_pool2d", x.dtype(), T => {
            let (x, y) = (read::<T>(x), write::<T>(y));
            for plane in 0..planes {
                let image = &x[plane * height * width..(plane + 1) * height * width];
                let target = plane * out_h * out_w;
                y[target..target + out_h * out_w].fill(T::narrow(f32::NEG_INFINITY));
                indices[target..target + out_h * out_w].fill(-1);
                walk(window, &plane_shape, |row, _, place| {
                    let Some(place) = place else { return };
                    let (value, best) = (image[place].widen(), y[target + row].widen());
                    if value > best || indices[target + row] < 0 {
                        y[target + row] = image[place];
                        indices[target + row] = (plane * height * width + place) as i64;
                    }
                })?;
            }
            Ok(())
        })?
    }
}
