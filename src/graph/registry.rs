//! [`Registry`]: graphs by the name of their model, launched concurrently.

use std::{collections::BTreeMap, fmt, sync::Arc};

use super::{Exec, Graph};
use crate::{
    error::{Error, ErrorKind, Result},
    stream::{Stream, Ticket},
    sync::{Mutex, lock},
};

/// Graphs by model and index. A model may have several graphs, to be launched concurrently on separate streams. Usable
/// from any thread.
///
/// ```
/// use wakeline::{Buffer, Stream, device::{Device, Emulated}, graph::{Graph, Registry}};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let device = Device::emulated(Emulated::new());
/// let registry = Registry::new();
/// for _ in 0..3 {
///     let (graph, ()) = Graph::capture(&device, |capture| {
///         let mut scratch = capture.stream().alloc::<u8>(1 << 10)?;       // each graph's own
///         capture.stream().fill(&mut scratch, 1)
///     })?;
///     registry.add("ones", &graph)?;
/// }
/// let stream = Stream::new(&device)?;
/// registry.launch("ones", 2, &stream)?.completed().await?;
/// registry.remove("ones")?;
/// # Ok::<(), wakeline::Error>(())
/// # }).unwrap();
/// ```
#[derive(Default)]
pub struct Registry {
    models: Mutex<BTreeMap<String, Vec<Arc<Exec>>>>,
}

impl Registry {
    /// Creates an empty registry.
    pub fn new() -> Self {
        Self::default()
    }

    /// Instantiates a graph and adds it to a model. Returns its index within the model.
    ///
    /// # Errors
    /// Those of [`Graph::instantiate`].
    pub fn add(&self, model: impl Into<String>, graph: &Graph) -> Result<usize> {
        let (model, exec) = (model.into(), Arc::new(graph.instantiate()?));
        let mut models = lock(&self.models);
        let execs = models.entry(model).or_default();
        execs.push(exec);
        Ok(execs.len() - 1)
    }

    /// The number of graphs of a model.
    pub fn count(&self, model: &str) -> usize {
        lock(&self.models).get(model).map_or(0, Vec::len)
    }

    /// The names of the models.
    pub fn models(&self) -> Vec<String> {
        lock(&self.models).keys().cloned().collect()
    }

    /// The exec of a model with this index.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if there is no such graph; the message lists the models or the number of graphs.
    pub fn get(&self, model: &str, index: usize) -> Result<Arc<Exec>> {
        let models = lock(&self.models);
        let Some(execs) = models.get(model) else { return Err(unknown(model, &models)) };
        execs.get(index).cloned().ok_or_else(|| {
            let text =
                format!("model `{model}` has no graph {index}: it has {} graphs, with indices from 0", execs.len());
            Error::new(ErrorKind::Usage, text)
        })
    }

    /// Launches the graph of a model with this index.
    ///
    /// # Errors
    /// Those of [`get`](Self::get) and [`Exec::launch`].
    pub fn launch(&self, model: &str, index: usize, stream: &Stream) -> Result<Ticket> {
        self.get(model, index)?.launch(stream)
    }

    /// Removes a model. Launches in flight complete normally: the graphs and their memory are destroyed once the
    /// launches are done and all execs from [`get`](Self::get) are dropped.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if there is no such model.
    pub fn remove(&self, model: &str) -> Result<()> {
        let mut models = lock(&self.models);
        let Some(removed) = models.remove(model) else { return Err(unknown(model, &models)) };
        // Dropped outside the lock.
        drop(models);
        drop(removed);
        Ok(())
    }
}

fn unknown(model: &str, models: &BTreeMap<String, Vec<Arc<Exec>>>) -> Error {
    let known: Vec<_> = models.keys().map(|name| format!("`{name}`")).collect();
    let known = if known.is_empty() {
        "the registry is empty".into()
    } else {
        format!("the registry has {}", known.join(", "))
    };
    Error::new(ErrorKind::Usage, format!("no model `{model}`: {known}"))
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let models: Vec<_> = lock(&self.models).iter().map(|(name, execs)| (name.clone(), execs.len())).collect();
        // Formatted outside the lock, since the writer is user code.
        f.debug_map().entries(models).finish()
    }
}
