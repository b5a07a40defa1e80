//! [`Registry`]: graphs by the name of their model, launched beside each other.

use std::{collections::BTreeMap, fmt, sync::Arc};

use super::{Exec, Graph};
use crate::{
    error::{Error, ErrorKind, Result},
    stream::{Stream, Ticket},
    sync::{Mutex, lock},
};

/// Graphs by model and number: several a model, to be launched beside each other on streams of their own. Used from any
/// thread.
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
    /// Without graphs.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes an exec of a graph, and adds it to a model's, under the number that is returned: 0 for the first.
    ///
    /// # Errors
    /// As [`Graph::instantiate`].
    pub fn add(&self, model: impl Into<String>, graph: &Graph) -> Result<usize> {
        let (model, exec) = (model.into(), Arc::new(graph.instantiate()?));
        let mut models = lock(&self.models);
        let execs = models.entry(model).or_default();
        execs.push(exec);
        Ok(execs.len() - 1)
    }

    /// How many graphs a model has.
    pub fn count(&self, model: &str) -> usize {
        lock(&self.models).get(model).map_or(0, Vec::len)
    }

    /// The models' names.
    pub fn models(&self) -> Vec<String> {
        lock(&self.models).keys().cloned().collect()
    }

    /// A model's exec of this number.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if there is none; the message has what there is.
    pub fn get(&self, model: &str, index: usize) -> Result<Arc<Exec>> {
        let models = lock(&self.models);
        let Some(execs) = models.get(model) else { return Err(unknown(model, &models)) };
        execs.get(index).cloned().ok_or_else(|| {
            let text = format!("model `{model}` has no graph {index}: it has {}, counted from 0", execs.len());
            Error::new(ErrorKind::Usage, text)
        })
    }

    /// Launches a model's graph of this number.
    ///
    /// # Errors
    /// As [`get`](Self::get) and [`Exec::launch`].
    pub fn launch(&self, model: &str, index: usize, stream: &Stream) -> Result<Ticket> {
        self.get(model, index)?.launch(stream)
    }

    /// Removes a model. Launches that are in flight end well: its graphs and their memory go when they have, or when whoever
    /// has [got](Self::get) one drops it.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if there is no such model.
    pub fn remove(&self, model: &str) -> Result<()> {
        let mut models = lock(&self.models);
        let Some(removed) = models.remove(model) else { return Err(unknown(model, &models)) };
        // Not under the lock.
        drop(models);
        drop(removed);
        Ok(())
    }
}

fn unknown(model: &str, models: &BTreeMap<String, Vec<Arc<Exec>>>) -> Error {
    let known: Vec<_> = models.keys().map(|name| format!("`{name}`")).collect();
    let known = if known.is_empty() { "there is none".into() } else { format!("there is {}", known.join(", ")) };
    Error::new(ErrorKind::Usage, format!("no model `{model}`: {known}"))
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let models: Vec<_> = lock(&self.models).iter().map(|(name, execs)| (name.clone(), execs.len())).collect();
        // Without the lock: a writer may come here again.
        f.debug_map().entries(models).finish()
    }
}
