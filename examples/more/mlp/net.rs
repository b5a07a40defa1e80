//! A perceptron of equal layers: its weights, in a file, and its layers as operators.

use std::{fs, io::Write, path::Path, sync::Arc};

use half::f16;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use wakeline::prelude::*;

use crate::linear::{self, Linear};

/// Numbers per row, in all layers.
pub(crate) const WIDTH: usize = 512;
pub(crate) const LAYERS: usize = 4;
/// Numbers per layer in the file: its weights, output by output, then its bias.
const LAYER: usize = WIDTH * WIDTH + WIDTH;

pub(crate) struct Net(Vec<f16>);

impl Net {
    /// Random weights, scaled so that rows keep about their magnitude.
    pub(crate) fn random(seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let spread = (6.0 / WIDTH as f32).sqrt();
        Self((0..LAYERS * LAYER).map(|_| f16::from_f32((2.0 * random.random::<f32>() - 1.0) * spread)).collect())
    }

    /// Loads the weights from a file: float16, little-endian, layer by layer.
    pub(crate) fn load(path: &Path) -> Result<Self> {
        let bytes = fs::read(path)?;
        let expected = LAYERS * LAYER * size_of::<f16>();
        if bytes.len() != expected {
            return Err(format!("{} bytes instead of {expected}, for {LAYERS} layers of {WIDTH}", bytes.len()).into());
        }
        Ok(Self(bytes.chunks_exact(2).map(|two| f16::from_le_bytes([two[0], two[1]])).collect()))
    }

    /// Saves the weights to a file that appears only once it is complete.
    pub(crate) fn save(&self, path: &Path) -> Result<()> {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut staged = tempfile::NamedTempFile::new_in(folder)?;
        staged.write_all(&self.0.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<_>>())?;
        staged.persist(path).map_err(|error| error.error)?;
        Ok(())
    }

    fn layer(&self, layer: usize) -> (&[f16], &[f16]) {
        self.0[layer * LAYER..][..LAYER].split_at(WIDTH * WIDTH)
    }

    pub(crate) fn on_host(&self, input: &[f16]) -> Vec<f16> {
        let rows = input.len() / WIDTH;
        (0..LAYERS).fold(input.to_vec(), |input, layer| {
            let (weights, bias) = self.layer(layer);
            let mut output = vec![f16::ZERO; input.len()];
            linear::forward(&input, weights, bias, &mut output, [rows, WIDTH, WIDTH]);
            output
        })
    }
}

#[derive(Ports)]
pub(crate) struct LayerPorts {
    #[input]
    pub(crate) rows: Input<Envelope<f16>>,
    #[output]
    pub(crate) out: Output<Envelope<f16>>,
}

/// One layer, on a device. It only enqueues, so it can be replayed.
pub(crate) struct Layer {
    net: Arc<Net>,
    number: usize,
    linear: Option<Linear>,
}

impl Layer {
    pub(crate) fn new(net: &Arc<Net>, number: usize) -> Self {
        Self { net: net.clone(), number, linear: None }
    }
}

impl Operator for Layer {
    type Ports = LayerPorts;

    async fn start(&mut self, cx: &mut Cx) -> Result<()> {
        let (weights, bias) = self.net.layer(self.number);
        self.linear = Some(Linear::new(cx.stream()?, weights, bias)?);
        Ok(())
    }

    async fn compute(&mut self, ports: &mut LayerPorts, cx: &mut Cx) -> Result<()> {
        let Some(linear) = &mut self.linear else { return Err("the layer was not started".into()) };
        let input = ports.rows.take()?;
        let mut output = ports.out.blank().await?;
        output.set_len(input.len())?;
        let rows = input.len() / linear.sizes()[0];
        let len = input.len();
        linear.forward(cx.stream()?, rows, (&input, len), (&mut output, len))?;
        ports.out.send(output).await?;
        Ok(())
    }

    async fn stop(&mut self, _cx: &mut Cx) -> Result<()> {
        self.linear = None;
        Ok(())
    }
}
