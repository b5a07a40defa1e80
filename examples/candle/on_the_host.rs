use candle_core::{D, Device as Candle, Tensor};
use wakeline::{operator::MapPorts, prelude::*};

/// Scales each row of `columns` numbers to a sum of one, with candle on the host.
pub struct Normalise {
    pub columns: usize,
}

impl Operator for Normalise {
    type Ports = MapPorts<Envelope<f32>, Envelope<f32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        let mut rows = ports.input.take()?;
        let normal = normalised(rows.read().await?, self.columns).map_err(Error::other)?;
        rows.write().await?.copy_from_slice(&normal);
        Ok(ports.output.send(rows).await?)
    }
}

fn normalised(rows: &[f32], columns: usize) -> candle_core::Result<Vec<f32>> {
    let rows = Tensor::from_slice(rows, (rows.len() / columns, columns), &Candle::Cpu)?;
    rows.broadcast_div(&rows.sum_keepdim(D::Minus1)?)?.flatten_all()?.to_vec1()
}
